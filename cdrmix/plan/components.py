"""The components of the memory of training, and what is assumed about the runtime of a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cdrmix.config.schema import Config
from cdrmix.config.schema_training import Train
from cdrmix.ops.backend import Platform
from cdrmix.plan.trace import MicroBatch
from cdrmix.training.zero import deepspeed_stage, shards_whole_parameters

FP32 = 4
BYTES_16_BIT = 2  # of an element of an attached copy, bf16 or fp16
# Assumptions that must be measured on each card:
GPU_RUNTIME = int(0.9e9)  # context, loaded kernels, cuBLAS workspaces
NCCL_BUFFERS = int(0.6e9)  # of a process in a group of several
FRAGMENTATION_SHARE = 0.03  # of the memory that a micro-batch allocates and frees: gaps of the caching allocator
# Resident memory of Python, PyTorch, DeepSpeed and compiled kernels. Measured with the CPU build of PyTorch 2.13.
CPU_RUNTIME = int(0.8e9)


@dataclass(frozen=True)
class Component:
    """A part of the memory: bytes at the time of the highest use."""

    name: str
    bytes: int
    why: str


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one process.

    tensors: without the memory of the runtime. host_bytes: main memory that a process of a GPU run needs to build the
    model and for what train.offload moves, and the first process to gather a checkpoint; 0 on a CPU, where it is the
    memory of the device. untraced: why the activations are estimated by a formula; empty: they are traced.
    """

    components: tuple[Component, ...]
    saved_by_operator: dict[str, int]
    tensors: int
    host_bytes: int
    untraced: str = ""

    @property
    def total(self) -> int:
        return sum(component.bytes for component in self.components)


def micro_batches(train: Train, processes: int) -> int:
    """Micro-batches of a process in a step; at least 1, also for numbers of processes that cannot divide the step."""
    together = train.sequence_parallel * train.parts  # processes that have the same rows
    return max(1, train.batch_rows * together // (train.micro_batch_rows * processes))


def lasting_state(
    train: Train,
    platform: Platform,
    stage: int,
    processes: int,
    *,
    weights: Component,
    here: int,
    shared: int,
    itemsize: int,
    single: int = 0,
) -> tuple[list[Component], int]:
    """What a process keeps from step to step, and the bytes of it that `train.offload` keeps in main memory.

    here: trained parameters of a process. shared: its part of all of them, which ZeRO partitions. itemsize: bytes of a
    weight. single: parameters of the process that have one moment, by Muon, of `here` or with ZeRO of `shared`.
    """
    state = []
    copies = processes // train.parts
    whole = shards_whole_parameters(train, processes)  # then the weights themselves are updated
    if stage > 0 and not whole:
        state.append(Component("masters", FP32 * shared, f"the float32 weights of ZeRO, 1/{copies}"))
    moments = shared if stage > 0 else here
    share = f", 1/{copies}" if stage > 0 else ""
    which = "one of matrices, two of the rest" if single else "the two moments of AdamW"
    state.append(Component("optimizer", FP32 * (2 * moments - single), f"{which}{share}"))
    average = []
    if train.ema_decay is not None:
        averaged = FP32 * (shared if stage == 3 else here)
        average.append(Component("average", averaged, "the moving average of the weights"))
    if train.offload == "none" or platform == "cpu":
        return [weights, *state, *_gradients(train, stage, processes, here, shared), *average], 0
    # A buffer of the size of the largest parameter, on the device and in main memory, is left out.
    moved = sum(part.bytes for part in state)
    # Gradients; at stage 2 a copy of the weights on their way to the device, at stage 3 sums over micro-batches.
    moved += (FP32 + (itemsize if stage == 2 else FP32)) * shared
    if train.offload == "all":
        return average, moved + weights.bytes
    return [weights, *average], moved


def _gradients(train: Train, stage: int, processes: int, here: int, shared: int) -> Iterator[Component]:
    """Gradients that last between micro-batches; here, shared: as of `lasting_state`."""
    copies = processes // train.parts
    several = micro_batches(train, processes) > 1
    if stage < 2:
        if several:
            yield Component("gradients", FP32 * here, "float32, accumulated over the micro-batches")
        # Otherwise they are allocated while activations are freed: the trace includes them.
    elif stage == 2:
        times, why = (2, "accumulated, and of the micro-batch") if several else (1, "of the micro-batch")
        yield Component("gradients", times * FP32 * shared, f"float32, 1/{copies}, {why}")
    else:
        yield Component("gradients", FP32 * shared, f"float32, 1/{copies}")


def passes(
    config: Config, step: MicroBatch, *, elsewhere: int = 0, at_once: int = 1, source: str = ""
) -> Iterator[Component]:
    """The memory of the forward and the backward pass.

    elsewhere: bytes of the trace that are not in this process. at_once: micro-batches whose activations are kept, in a
    pipeline. source: where the numbers are from, for the table.
    """
    rows = f"{config.train.micro_batch_rows} x {config.data.row_length // config.train.sequence_parallel} tokens"
    how = ", only the inputs of the blocks" if config.train.activation_checkpointing else ""
    saved = at_once * step.total_saved
    several = f"of {at_once} micro-batches, " if at_once > 1 else ""
    yield Component("activations", saved, f"{several}saved by the forward pass of {rows}{how}{source}")
    working = max(0, step.peak - step.total_saved - elsewhere)
    yield Component("working", working, f"additional peak of the passes{source}")


def checkpoint_bytes(train: Train, processes: int, parameters: int, single: int = 0, updated: int | None = None) -> int:
    """Main memory in which the first process gathers a checkpoint: parameters and average, without ZeRO the moments.

    single: parameters that have one moment. updated: those of which it has the moments; None: all.
    """
    moments = 2 * (parameters if updated is None else updated) - single
    moments = moments if deepspeed_stage(train, processes) == 0 else 0
    return FP32 * (parameters * (1 + (train.ema_decay is not None)) + moments)


def memory_plan(
    parts: Iterable[Component],
    step: MicroBatch,
    platform: Platform,
    processes: int,
    host_bytes: int,
    untraced: str = "",
) -> MemoryPlan:
    """The plan of these components and the runtime of the device. host_bytes: of a GPU run."""
    parts = tuple(parts)
    tensors = sum(part.bytes for part in parts)
    if platform == "cpu":
        runtime = Component("runtime", CPU_RUNTIME, "Python, PyTorch, DeepSpeed and compiled kernels, resident")
        return MemoryPlan((*parts, runtime), step.saved, tensors, 0, untraced)
    libraries = GPU_RUNTIME + (NCCL_BUFFERS if processes > 1 else 0)
    more = (
        Component("runtime", libraries, "context and libraries: assumed, not measured"),
        Component("fragments", int(FRAGMENTATION_SHARE * step.peak), "gaps of the allocator: assumed, not measured"),
    )
    return MemoryPlan((*parts, *more), step.saved, tensors, host_bytes, untraced)
