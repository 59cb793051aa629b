"""Faults during training as errors with a remedy: signals, exhausted memory, NaN."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

import torch

from cdrmix.config.schema import Config
from cdrmix.errors import NonFiniteLossError, OutOfMemoryError

# The first loss scale of fp16, 2**16, may need 16 halvings until the gradients are finite. Later the scale grows only
# while they are finite, so one halving is enough. More skipped steps in a row mean a real NaN.
MAX_CONSECUTIVE_SKIPS = 20
WHEN_NOT_FINITE = (
    "--resume auto repeats the same steps from the last checkpoint, so it helps only if the machine was at fault. "
    "Otherwise start a new run with a lower train.learning_rate or train.gradient_clip, with more train.warmup_steps, "
    "or without the rows of that batch."
)


SAME_INTERRUPT = 1.0  # seconds in which SIGINT counts once: Ctrl-C may arrive from the terminal and the launcher


class StopRequest:
    """Notes SIGTERM, SIGHUP and SIGINT, so that the training can stop between two steps. A context manager.

    SIGTERM and SIGHUP may arrive several times: when a scheduler ends a job, a worker gets one signal from it, one from
    the launcher and one from torchrun, and must still save its checkpoint. A second SIGINT, one second after the first
    or later, ends the process at once.

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
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
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


def check_finite(loss: float, step: int) -> None:
    """Raises NonFiniteLossError when the loss of the global batch is NaN or infinite; called before the update."""
    if not math.isfinite(loss):
        raise NonFiniteLossError(
            f"the loss of step {step} (global batch {step - 1} of the seed's order) is {loss}; the update was not "
            f"applied. {WHEN_NOT_FINITE}"
        )


class Skips:
    """Counts updates that were skipped for a non-finite gradient norm. Only fp16 may skip, up to a limit."""

    def __init__(self, *, may_skip: bool, total: int = 0) -> None:
        self.may_skip = may_skip
        self.total = total
        self.consecutive = 0

    def record(self, applied: bool, step: int) -> None:
        """Counts a step. Raises NonFiniteLossError when a skip cannot be explained by a loss scale that is too high."""
        if applied:
            self.consecutive = 0
            return
        self.total += 1
        self.consecutive += 1
        if not self.may_skip:
            raise NonFiniteLossError(
                f"the gradient norm of step {step} (global batch {step - 1} of the seed's order) is not finite; the "
                f"update was not applied. {WHEN_NOT_FINITE}"
            )
        if self.consecutive >= MAX_CONSECUTIVE_SKIPS:
            raise NonFiniteLossError(
                f"{self.consecutive} steps in a row, the last of them step {step} (global batch {step - 1}), had "
                "non-finite gradients and were skipped. Start a new run with train.precision=bf16 (or fp32), or with a "
                "lower train.learning_rate: --resume auto would repeat the same steps."
            )


@contextmanager
def memory_guard(config: Config) -> Iterator[None]:
    """Turns exhausted memory, of the device or host, into OutOfMemoryError that names the keys to change."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error)
        exhausted = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text
        if not exhausted:
            raise
        train = config.train
        raise OutOfMemoryError(
            "a training step does not fit in memory. Each of these reduces it: "
            f"train.micro_batch_rows (now {train.micro_batch_rows}; gradients stay the same), "
            f"train.activation_checkpointing: true (now {str(train.activation_checkpointing).lower()}), "
            f"train.zero_stage: 1, 2 or 3 with several processes (now {train.zero_stage}), "
            f"train.expert_parallel: above 1 with several processes (now {train.expert_parallel}), "
            f"train.offload: optimizer or all, on a GPU (now {train.offload}). "
            f"The failed request: {text.splitlines()[0] if text else type(error).__name__}"
        ) from error
