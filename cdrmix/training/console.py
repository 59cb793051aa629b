"""Progress on the console: one live line on a terminal, aligned plain lines otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from cdrmix.records import PhaseRecord, Record, StepRecord
from cdrmix.run_folder import RunFolder
from cdrmix.training.callbacks import Callback
from cdrmix.units import amount, clock


class Console(Callback):
    """Progress of stage A: one live line on a terminal, aligned plain lines otherwise.

    A context manager. Every record is also a plain line of train.log. shown: whether the console shows it. rows: of all
    steps before one, to which the time that is left is in proportion; None: every step takes as long.
    """

    def __init__(
        self,
        run: RunFolder,
        total_steps: int,
        *,
        start_step: int = 0,
        stream: IO[str] | None = None,
        shown: bool = True,
        rows: Callable[[int], int] | None = None,
    ) -> None:
        self._run, self._shown = run, shown
        self._total, self._rows = total_steps, rows or int
        self._step = start_step
        self._start = (start_step, time.monotonic())
        self._valid: float | None = None
        self._lines = 0
        stream = sys.stdout if stream is None else stream
        self._stream = stream
        self._progress: Progress | None = None
        if run.writes and shown and stream.isatty():
            self._progress = Progress(
                TextColumn(f"step {{task.fields[step]:>{len(str(total_steps))}}}/{total_steps}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(compact=True, elapsed_when_finished=True),
                console=RichConsole(file=stream),
                expand=True,
            )
            self._task = self._progress.add_task(
                "train",
                total=self._rows(total_steps),
                completed=self._rows(start_step),
                step=start_step,
                figures="",
            )

    def __enter__(self) -> Console:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def on_step(self, step: int) -> None:
        """Moves the bar to `step`, where there is a bar."""
        self._step = step
        if self._progress is not None:
            self._progress.update(self._task, completed=self._rows(step), step=step)

    def on_record(self, record: Record) -> None:
        """Shows one record."""
        assert isinstance(record, StepRecord)
        if not self._run.writes:
            return
        if record.valid_bits_per_byte is not None:
            self._valid = record.valid_bits_per_byte
        line = self._line(record)
        if self._progress is not None:
            self._progress.update(self._task, figures=self._figures(record))
        elif self._shown:
            if self._lines % 20 == 0:
                print(self._header(), file=self._stream)
            print(line, file=self._stream, flush=True)
        self._lines += 1
        self._run.note(line)

    def _figures(self, record: StepRecord) -> str:
        valid = "" if self._valid is None else f"  valid [bold]{self._valid:.3f}[/] bits/byte"
        return f"loss [bold]{record.next_token_loss:.3f}[/]{valid}  {amount(record.tokens_per_second)} tok/s"

    def _header(self) -> str:
        width = 2 * len(str(self._total)) + 1
        return (
            f"{'step':>{width}}  {'loss':>7}  {'bits/byte':>9}  {'lr':>8}  {'grad':>7}  "
            f"{'tokens/s':>8}  {'entropy':>7}  {'left':>8}"
        )

    def _line(self, record: StepRecord) -> str:
        count = f"{record.step}/{self._total}"
        valid = "" if record.valid_bits_per_byte is None else f"{record.valid_bits_per_byte:.4f}"
        entropies = record.router.get("entropy_bits", [])
        entropy = f"{sum(entropies) / len(entropies):.3f}" if entropies else "-"
        return (
            f"{count:>{2 * len(str(self._total)) + 1}}  {record.next_token_loss:7.4f}  {valid:>9}  "
            f"{record.learning_rate:8.2e}  {record.gradient_norm:7.3f}  {amount(record.tokens_per_second):>8}  "
            f"{entropy:>7}  {self._left(record.step):>8}"
        )

    def _left(self, step: int) -> str:
        start_step, start_time = self._start
        if step <= start_step:
            return "-"
        done, left = self._rows(step) - self._rows(start_step), self._rows(self._total) - self._rows(step)
        return clock((time.monotonic() - start_time) / done * left)


class PhaseConsole(Callback):
    """Progress of a phase: aligned lines under the names of its measures. A context manager."""

    WIDTH = 88  # characters of measures

    def __init__(self, run: RunFolder, phase: str, steps: int, *, shown: bool = True) -> None:
        self._run, self._phase, self._steps, self._shown = run, phase, steps, shown
        self._lines = 0
        self._start: tuple[int, float] | None = None

    def __enter__(self) -> PhaseConsole:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def on_record(self, record: Record) -> None:
        """Shows one record."""
        assert isinstance(record, PhaseRecord)
        if not self._run.writes:
            return
        widths, space = {}, self.WIDTH
        for name in record.measures:  # as many as fit; metrics.jsonl has all
            space -= max(len(name), 7) + 2
            if space >= 0:
                widths[name] = max(len(name), 7)
        count = f"{record.phase_step}/{self._steps}"
        width_of_count = len(self._phase) + 2 + 2 * len(str(self._steps))
        now = time.monotonic()
        self._start = self._start or (record.phase_step, now)
        steps, seconds = record.phase_step - self._start[0], now - self._start[1]
        left = clock(seconds / steps * (self._steps - record.phase_step)) if steps else "-"
        figures = "  ".join(f"{_short(record.measures[name]):>{width}}" for name, width in widths.items())
        line = f"{f'{self._phase} {count}':>{width_of_count}}  {figures}  {left:>6}"
        if self._shown:
            if self._lines % 20 == 0:
                names = "  ".join(f"{name:>{width}}" for name, width in widths.items())
                print(f"{'phase':>{width_of_count}}  {names}  {'left':>6}")
            print(line, flush=True)
        self._lines += 1
        self._run.note(line)


def _short(value: float) -> str:
    """A measure in at most seven characters."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
