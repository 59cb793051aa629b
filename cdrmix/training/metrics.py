"""What one optimizer step reports, and where it goes: console, metrics.jsonl, optional trackers."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, Protocol

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.run_folder import RunFolder, finite


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Losses are in nats; `routers` are named as in `Model.routers`; `router` maps a measure to one
    value of each; `load` has for each every expert's share of the routes, 1 / E where it is even.

    `loss` is what was optimised; `next_token_loss` is nats per valid token of the global batch;
    `tokens` counts valid tokens since the start of the run, `seconds` training time since then.
    The validation figures are there on the steps that evaluated.
    """

    step: int
    epoch: float
    loss: float
    next_token_loss: float
    load_balance: float
    z_loss: float
    learning_rate: float
    gradient_norm: float
    tokens: int
    tokens_per_second: float
    seconds: float
    memory_gib: float
    routers: list[str] = field(default_factory=list)
    router: dict[str, list[float]] = field(default_factory=dict)
    load: list[list[float]] = field(default_factory=list)
    valid_bits_per_byte: float | None = None
    valid_loss: float | None = None


@dataclass(frozen=True)
class PhaseRecord:
    """One optimizer step of a phase of stage B. `step` goes on counting where stage A ended, `phase_step` from 1.

    measures: what the phase shows of its step, by name: means and rates.
    """

    step: int
    phase: str
    phase_step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    seconds: float
    memory_gib: float
    measures: dict[str, float]


Record = StepRecord | PhaseRecord


class Console:
    """Progress for a person: one live line on a terminal, aligned plain lines otherwise.

    Use as a context manager. Every record is also noted in train.log as a plain line.
    """

    def __init__(self, run: RunFolder, total_steps: int, *, start_step: int = 0, stream: IO[str] | None = None) -> None:
        self._run = run
        self._total = total_steps
        self._step = start_step
        self._start = (start_step, time.monotonic())
        self._valid: float | None = None
        self._lines = 0
        stream = sys.stdout if stream is None else stream
        self._stream = stream
        self._progress: Progress | None = None
        if run.writes and stream.isatty():
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(compact=True, elapsed_when_finished=True),
                console=RichConsole(file=stream),
                expand=True,
            )
            self._task = self._progress.add_task("train", total=total_steps, completed=start_step, figures="")

    def __enter__(self) -> Console:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, step: int) -> None:
        """Moves the bar to `step`; costs nothing where there is no bar."""
        self._step = step
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def update(self, record: StepRecord) -> None:
        """Shows one record."""
        if not self._run.writes:
            return
        if record.valid_bits_per_byte is not None:
            self._valid = record.valid_bits_per_byte
        self.advance(record.step)
        line = self._line(record)
        if self._progress is not None:
            self._progress.update(self._task, figures=self._figures(record))
        else:
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
        return clock((time.monotonic() - start_time) / (step - start_step) * (self._total - step))


class PhaseConsole:
    """A phase's progress for a person: aligned lines, the names of what is measured above them. A context manager."""

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

    def update(self, record: PhaseRecord) -> None:
        """Shows one record."""
        if not self._run.writes:
            return
        widths, room = {}, self.WIDTH
        for name in record.measures:  # as many as there is room for; metrics.jsonl has all
            room -= max(len(name), 7) + 2
            if room >= 0:
                widths[name] = max(len(name), 7)
        count = f"{record.phase_step}/{self._steps}"
        place = len(self._phase) + 2 + 2 * len(str(self._steps))
        now = time.monotonic()
        self._start = self._start or (record.phase_step, now)
        steps, seconds = record.phase_step - self._start[0], now - self._start[1]
        left = clock(seconds / steps * (self._steps - record.phase_step)) if steps else "-"
        figures = "  ".join(f"{_short(record.measures[name]):>{width}}" for name, width in widths.items())
        line = f"{f'{self._phase} {count}':>{place}}  {figures}  {left:>6}"
        if self._shown:
            if self._lines % 20 == 0:
                names = "  ".join(f"{name:>{width}}" for name, width in widths.items())
                print(f"{'phase':>{place}}  {names}  {'left':>6}")
            print(line, flush=True)
        self._lines += 1
        self._run.note(line)


def _short(value: float) -> str:
    """A measure in at most seven characters."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def amount(value: float) -> str:
    """A count for people: 950, 10.7k, 1.25M, 3.2B."""
    rounded = float(f"{value:.3g}")  # first, because 999,700 is 1M, not 1000k
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(rounded) >= limit:
            return f"{rounded / limit:g}{unit}"
    return f"{rounded:g}"


def clock(seconds: float) -> str:
    """A duration as m:ss or h:mm:ss."""
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


class Tracker(Protocol):
    """A place that takes step records."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """Every place a record goes to: metrics.jsonl always, the others as `logging` says. A context manager.

    Raises ConfigError, before the first step, when a tracker's package is not installed.
    """

    def __init__(self, run: RunFolder, config: Config) -> None:
        self._trackers: list[Tracker] = []
        if not run.writes:
            return
        check_trackers(config)
        for name, tracker in TRACKERS.items():
            if getattr(config.logging, name):
                self._trackers.append(tracker(run, config))
        self._trackers.insert(0, JsonLines(run))

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def write(self, record: Record) -> None:
        """Hands one record to every tracker."""
        for tracker in self._trackers:
            tracker.write(record)

    def close(self) -> None:
        """Flushes and closes every tracker; again is harmless."""
        while self._trackers:
            self._trackers.pop().close()


class JsonLines:
    """metrics.jsonl: one JSON object a record, each line handed to the operating system at once."""

    def __init__(self, run: RunFolder) -> None:
        written = run.metrics_jsonl.read_bytes() if run.metrics_jsonl.exists() else b""
        torn = written != b"" and not written.endswith(b"\n")
        self._file = run.metrics_jsonl.open("a", buffering=1, encoding="utf-8")
        if torn:  # a killed run's half line must not swallow the next record
            self._file.write("\n")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(finite(dataclasses.asdict(record)), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars for TensorBoard, in the run folder's tensorboard/."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        _package("tensorboard")
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(run.path / "tensorboard"))

    def write(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Scalars for Weights & Biases; the run carries the folder's name, so a resumed run goes on in it."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        wandb = _package("wandb")
        self._run = wandb.init(
            project="cdrmix",
            name=f"{config.run.name}-{run.path.name}",
            id=run.path.name,
            resume="allow",
            dir=str(run.path),
            config=config.model_dump(mode="json"),
        )

    def write(self, record: Record) -> None:
        self._run.log(scalars(record), step=record.step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Metrics for MLflow; the tracking server is MLflow's own setting (MLFLOW_TRACKING_URI)."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        self._mlflow = _package("mlflow")
        self._mlflow.set_experiment("cdrmix")
        known = run.summary().get("mlflow_run")
        active = self._mlflow.start_run(run_id=known) if known else self._mlflow.start_run(run_name=run.path.name)
        run.update_summary({"mlflow_run": active.info.run_id})

    def write(self, record: Record) -> None:
        self._mlflow.log_metrics(scalars(record), step=record.step)

    def close(self) -> None:
        self._mlflow.end_run()


# By the names of their packages, which are also their keys under `logging`.
TRACKERS: dict[str, Callable[[RunFolder, Config], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def scalars(record: Record) -> dict[str, float]:
    """A record as flat numbers: `router/entropy_bits/layer3`, and so on; what is None is left out."""
    flat: dict[str, float] = {}
    fields = dataclasses.asdict(record)
    routers = router_names(fields) if "routers" in fields else []
    for name, value in fields.items():
        if isinstance(value, dict):
            for measure, numbers in value.items():
                if isinstance(numbers, int | float):
                    flat[f"{fields['phase']}/{measure}"] = numbers
                    continue
                flat |= {f"{name}/{measure}/layer{router}": each for router, each in zip(routers, numbers, strict=True)}
        elif name == "load":
            for router, shares in zip(routers, value, strict=False):
                flat |= {f"{name}/layer{router}/expert{expert}": share for expert, share in enumerate(shares)}
        elif value is not None and name not in ("step", "routers", "phase"):
            flat[name] = value
    return flat


def router_names(record: Mapping[str, Any]) -> list[str]:
    """The names of the routers of a record; of one that has none of them (metrics.jsonl of before), their numbers."""
    counted = [record.get("load", []), *record.get("router", {}).values()]
    return record.get("routers") or [str(number) for number in range(max(map(len, counted)))]


def check_trackers(config: Config) -> None:
    """Raises ConfigError when `logging` asks for a package that is not installed; imports none of them."""
    missing = [name for name in TRACKERS if getattr(config.logging, name) and not _is_installed(name)]
    if missing:
        raise ConfigError("\n  ".join(_how_to_install(name) for name in missing))


def _is_installed(name: str) -> bool:
    # A module that is imported already need not have a spec, and find_spec would raise.
    return sys.modules.get(name) is not None or importlib.util.find_spec(name) is not None


def _package(name: str) -> Any:
    if not _is_installed(name):
        raise ConfigError(_how_to_install(name))
    return importlib.import_module(name)


def _how_to_install(name: str) -> str:
    return (
        f"logging.{name}: true needs the package {name}, which is not installed: pip install {name} (or, in the "
        f"project's checkout, pip install -e '.[{name}]'), or set logging.{name}: false"
    )
