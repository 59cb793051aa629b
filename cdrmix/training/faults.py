"""What may go wrong while training, turned into errors that say what to do: signals, memory, NaN."""

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

# fp16's first loss scale, 2**16, may take 16 halvings until the gradients fit. A scale that has grown since did so
# only while they fitted, so it is one doubling too large at most; more skips in a row mean a real NaN.
MAX_CONSECUTIVE_SKIPS = 20
WHEN_NOT_FINITE = (
    "--resume auto repeats the same steps from the last checkpoint, and so ends here again unless the machine was at "
    "fault. Otherwise start a new run, which is what a changed configuration or text always is, with a lower "
    "train.learning_rate or train.gradient_clip or a longer train.warmup_steps, or without the rows of that batch."
)


SAME_INTERRUPT = 1.0  # seconds in which SIGINT counts once: a terminal's Ctrl-C can arrive by two ways


class StopRequest:
    """SIGTERM, SIGHUP and SIGINT as a question to ask between steps.

    SIGTERM and SIGHUP may come any number of times: where a scheduler ends all processes of a job, a worker
    gets one from it, one from the launcher and one from torchrun, and must still save its checkpoint. Only a person
    who repeats Ctrl-C, a second after the first or later, ends the process at once.

    A context manager: the former handlers return on leaving, and a signal that was ignored (SIGHUP under nohup)
    stays ignored. In a thread that is not the main one it never asks to stop, because Python delivers signals to
    the main thread only.
    """

    def __init__(self) -> None:
        self._asked = False
        self._interrupted: float | None = None  # when the first SIGINT came, on the monotonic clock
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
    """Counts updates that the gradient norm forbade. Only fp16 may skip, and not forever."""

    def __init__(self, *, may_skip: bool, total: int = 0) -> None:
        self.may_skip = may_skip
        self.total = total
        self.consecutive = 0

    def record(self, applied: bool, step: int) -> None:
        """Takes note of a step. Raises NonFiniteLossError when a skip means more than a loss scale too high."""
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
    """Turns an exhausted device or host memory into OutOfMemoryError naming the keys that shrink the step."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error)
        exhausted = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text
        if not exhausted:
            raise
        train = config.train
        raise OutOfMemoryError(
            "a training step does not fit in memory. Any of these makes it smaller: "
            f"train.micro_batch_rows (now {train.micro_batch_rows}; gradients stay the same), "
            f"train.activation_checkpointing: true (now {str(train.activation_checkpointing).lower()}), "
            f"train.zero_stage: 1, 2 or 3 with several processes (now {train.zero_stage}), "
            f"train.expert_parallel: above 1 with several processes (now {train.expert_parallel}). "
            f"What was asked for: {text.splitlines()[0] if text else type(error).__name__}"
        ) from error
