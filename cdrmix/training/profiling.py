"""Profiles the steps that `train.profile` names: a timeline, a table of operations, a snapshot of GPU memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from cdrmix.config.schema import Config
from cdrmix.run_folder import RunFolder
from cdrmix.training.callbacks import Callback
from cdrmix.training.distributed import DistributedContext

ROWS = 60  # rows of the table of operations
HISTORY = 200_000  # allocations and frees in a snapshot of GPU memory


class Profiler(Callback):
    """Profiles steps `first` to `first + steps - 1` of this process. A context manager.

    Writes into profile/ of the run folder: trace.json.gz (for Perfetto or chrome://tracing), operations.txt (time and
    memory by operation) and, on a GPU, memory.pickle (for PyTorch's memory viewer). A run that ends before the last
    profiled step writes the steps so far.
    """

    def __init__(self, first: int, steps: int, run: RunFolder, device: torch.device) -> None:
        self._run, self._device = run, device
        self._first, self._last, self._step = first, first + steps - 1, 1
        on_gpu = device.type == "cuda"
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
            # The step before the first one warms the profiler up; step 1 has none before it.
            schedule=schedule(wait=max(first - 2, 0), warmup=min(first - 1, 1), active=steps, repeat=1),
            on_trace_ready=self._write,
            profile_memory=True,
            record_shapes=True,
        )

    def __enter__(self) -> Profiler:
        self._profile.__enter__()
        self._record_memory()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._profile.__exit__(kind, error, traceback)
        if self._step < self._first:
            self._run.say(f"train.profile: this process ended before step {self._first}, the first to be profiled")

    def on_step(self, step: int) -> None:
        """Ends the profiler's step."""
        if self._step <= self._last:
            self._step += 1
            self._profile.step()
            self._record_memory()

    def _record_memory(self) -> None:
        if self._device.type == "cuda" and self._step == self._first:
            torch.cuda.memory._record_memory_history(max_entries=HISTORY)

    def _write(self, traced: profile) -> None:
        folder, on_gpu = self._run.profile, self._device.type == "cuda"
        folder.mkdir(exist_ok=True)
        traced.export_chrome_trace(str(folder / "trace.json.gz"))
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        table = traced.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=80)
        (folder / "operations.txt").write_text(table + "\n", encoding="utf-8")
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        self._run.say(f"Profile of steps {self._first} to {self._step - 1} of this process: {folder}")


def make_profiler(config: Config, run: RunFolder, world: DistributedContext) -> AbstractContextManager[Callback]:
    """The profiler of a run, in its first process. Elsewhere and without `train.profile` it has no effect."""
    settings = config.train.profile
    if settings is None or not world.is_main_process:
        return nullcontext(Callback())
    return Profiler(settings.first, settings.steps, run, world.device)
