"""Faults during training as errors with a remedy: signals, exhausted memory, NaN."""

from __future__ import annotations

import errno
import math
import os
import signal
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType, TracebackType

import torch

from cdrmix.config.schema import Config
from cdrmix.config.schema_training import Skip
from cdrmix.errors import NonFiniteLossError, OutOfMemoryError
from cdrmix.training.launch import STOP_SIGNALS, fewer_rows, note_exhausted

# The first loss scale of fp16, 2**16, may need 16 halvings until the gradients are finite. Later the scale grows only
# while they are finite, so one halving is enough. More skipped steps in a row mean a real NaN.
MAX_CONSECUTIVE_SKIPS = 20
MAX_CONSECUTIVE_SPIKES = 8  # then the loss has a new level
RECENT = 128  # losses; a spike is judged from half as many on
ROBUST = 1.4826  # the standard deviation of a normal distribution over its median absolute deviation
NORM = "the gradient norm is not finite"
SKIPPED = {"nonfinite", "spike"}  # kinds of faults in Progress.consecutive_skips; the third, overflow, is usual in fp16
WHEN_NOT_FINITE = (
    "--resume auto repeats the same steps from the last checkpoint, so it helps only if the machine was at fault. "
    "With train.skip.nonfinite=3 it skips up to 3 such steps in a row. If more follow, start a new run with a lower "
    "train.learning_rate or train.gradient_clip, or with more train.warmup_steps."
)
WHEN_SKIPPED = (
    "Start a new run with a lower train.learning_rate or train.gradient_clip, or with more train.warmup_steps; or "
    "resume with a higher train.skip.nonfinite."
)


SAME_INTERRUPT = 1.0  # seconds in which SIGINT counts once: Ctrl-C may arrive from the terminal and the launcher


class StopRequest:
    """Notes STOP_SIGNALS, so that the training can stop between two steps. A context manager.

    All but SIGINT may arrive several times: when a scheduler ends a job, a worker gets one signal from it and one from
    the launcher, and another one where a process has failed, and must still save its checkpoint. A second SIGINT, one
    second after the first or later, ends the process at once.

    On exit the former handlers are restored. A signal that was ignored (SIGHUP under nohup) stays ignored. Python
    delivers signals to the main thread only, so in another thread no signal is noted.
    """

    def __init__(self) -> None:
        self._asked = False
        self._interrupted: float | None = None  # time of the first SIGINT, on the monotonic clock
        self._former: dict[signal.Signals, signal.Handlers | object] = {}

    @property
    def requested(self) -> bool:
        return self._asked

    def request(self) -> None:
        """Asks to stop, as a signal does."""
        self._asked = True

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._former[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted is None:
                self._interrupted = now
            elif now - self._interrupted >= SAME_INTERRUPT:
                os._exit(128 + number)
        self._asked = True


class TooManySkips(Exception):
    """More steps in a row were skipped than are allowed, and the run may go back to a checkpoint.

    harmless: they were spikes, after which the training can go on as well.
    """

    def __init__(self, message: str, *, harmless: bool) -> None:
        super().__init__(message)
        self.harmless = harmless


class Skips:
    """Decides which updates are not applied, from the loss of the global batch, so alike in every process.

    settings: train.skip. fp16: gradients may overflow, up to a limit. total: of the run so far. consecutive: before the
    next step, by kind of fault. recent: the last losses that were trained on, where settings.spike needs them.
    goes_back: too many of them in a row raise TooManySkips.
    """

    def __init__(
        self,
        settings: Skip,
        *,
        fp16: bool,
        total: int = 0,
        consecutive: Mapping[str, int] = {},
        recent: Sequence[float] = (),
        goes_back: bool = False,
    ) -> None:
        self._settings, self._fp16, self.total, self._goes_back = settings, fp16, total, goes_back
        self.consecutive = Counter(consecutive)
        self.recent: deque[float] = deque(recent, maxlen=RECENT)

    def reason(self, loss: float) -> str | None:
        """Why the update of a step with this loss must not be applied; None: nothing is wrong with the loss."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        factor = self._settings.spike
        if factor is None or len(self.recent) < RECENT // 2:
            return None
        usual = statistics.median(self.recent)
        deviation = ROBUST * statistics.median(abs(each - usual) for each in self.recent)
        if deviation == 0.0 or loss <= usual + factor * deviation:
            return None
        if self.consecutive["spike"] >= MAX_CONSECUTIVE_SPIKES:
            self.recent.clear()  # the loss has a new level
            return None
        return f"the loss {loss:.6g} is a spike: usual are {usual:.6g} +- {deviation:.2g}"

    @property
    def skipping(self) -> bool:
        """Whether the last step was skipped, and not for an overflow of fp16, which is usual."""
        return SKIPPED & self.consecutive.keys() != set()

    def is_overflow(self, reason: str) -> bool:
        """Whether the scale of fp16 may be the cause, which then is lowered."""
        return self._fp16 and reason == NORM

    def record(self, step: int, loss: float, reason: str | None) -> None:
        """Counts a step. reason: why it was not applied; None: it was.

        Raises NonFiniteLossError when too many steps in a row were not finite; instead of it, and after too many
        spikes, TooManySkips if the run may go back.
        """
        if reason is None:
            self.consecutive.clear()
            if self._settings.spike is not None:
                self.recent.append(loss)
            return
        self.total += 1
        overflow = self.is_overflow(reason)
        kind = "overflow" if overflow else "nonfinite" if reason == NORM or not math.isfinite(loss) else "spike"
        self.consecutive[kind] += 1
        limits = {"nonfinite": self._settings.nonfinite, "spike": MAX_CONSECUTIVE_SPIKES - 1}
        if self._goes_back and kind in limits and self.consecutive[kind] > limits[kind]:
            raise TooManySkips(
                f"{reason}; {self.consecutive[kind]} steps in a row were skipped", harmless=kind == "spike"
            )
        allowed = max(self._settings.nonfinite, MAX_CONSECUTIVE_SKIPS - 1 if overflow else 0)
        if kind == "spike" or self.consecutive[kind] <= allowed:
            return
        if overflow:
            raise NonFiniteLossError(
                f"{self.consecutive[kind]} steps in a row, the last of them step {step} (global batch {step - 1}), had "
                "non-finite gradients and were skipped. Start a new run with train.precision=bf16 (or fp32), or with a "
                "lower train.learning_rate: --resume auto would repeat the same steps."
            )
        before = f", after {allowed} that were skipped (train.skip.nonfinite)" if allowed else ""
        raise NonFiniteLossError(
            f"{reason} at step {step} (global batch {step - 1} of the seed's order){before}; the update was not "
            f"applied. {WHEN_SKIPPED if allowed else WHEN_NOT_FINITE}"
        )


@contextmanager
def _guarded(message: Callable[[], str]) -> Iterator[None]:
    """Turns exhausted memory, of the device or host, into OutOfMemoryError with the message and the failed request."""
    try:
        yield
    except OutOfMemoryError:  # of a guard in this one
        raise
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error)
        allocated = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text
        mapped = "unable to mmap" in text and os.strerror(errno.ENOMEM) in text
        if not allocated and not mapped:
            raise
        request = text.splitlines()[0] if text else type(error).__name__
        raise OutOfMemoryError(f"{message()} The failed request: {request}") from error


def memory_guard_after_training(run: Path) -> AbstractContextManager[None]:
    """Turns memory that the evaluation or the export at the end exhausts into OutOfMemoryError."""
    return _guarded(
        lambda: (
            "the evaluation or the export after the training does not fit in memory: the first process needs the whole "
            "model. The training is complete, and its checkpoints are kept. Continue where there is more memory, with "
            f"--resume {run}."
        )
    )


def memory_guard(config: Config, *, in_rows: bool) -> AbstractContextManager[None]:
    """Turns memory that the training exhausts into OutOfMemoryError that names the keys to change.

    in_rows: micro-batches of train.micro_batch_rows rows may have taken it. Then the launcher is told that fewer rows
    may help.
    """

    def message() -> str:
        train, continues = config.train, ""
        if in_rows and train.micro_batch_rows > 1:
            note_exhausted()  # tells the launcher
            rows, parts = fewer_rows(train.micro_batch_rows, train.micro_batch_parts)
            continues = (
                f"; this run continues with train.micro_batch_rows={rows} train.micro_batch_parts={parts}, which "
                "--max-restarts sets"
            )
        return (
            "a training step does not fit in memory. Each of these reduces it: "
            f"train.micro_batch_rows (now {train.micro_batch_rows}{continues}), "
            f"train.activation_checkpointing: true (now {str(train.activation_checkpointing).lower()}), "
            f"train.zero_stage: 1, 2 or 3 with several processes (now {train.zero_stage}), "
            f"train.expert_parallel: above 1 with several processes (now {train.expert_parallel}), "
            f"train.sequence_parallel: above 1 with several processes, for long rows (now {train.sequence_parallel}), "
            f"train.tensor_parallel: above 1 with several GPUs of one machine (now {train.tensor_parallel}), "
            f"train.pipeline_parallel: above 1 with several processes (now {train.pipeline_parallel}), "
            f"train.offload: optimizer or all, on a GPU (now {train.offload})."
        )

    return _guarded(message)
