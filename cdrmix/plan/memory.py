"""The memory of training on each device, by component.

The state is counted as in DeepSpeed 0.19 with float32 parameters. Activations are traced (`trace`). A gigabyte is 10^9
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cdrmix.config.schema import Config
from cdrmix.ops.backend import Platform
from cdrmix.plan.parameters import count_parameters
from cdrmix.plan.trace import trace
from cdrmix.training.engine import BUCKET, MOST_LIVE
from cdrmix.training.reduction import IN_FLIGHT
from cdrmix.training.zero import zero_stage

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
    model, and the first process to gather a checkpoint; 0 on a CPU, where it is the memory of the device.
    """

    components: tuple[Component, ...]
    saved_by_operator: dict[str, int]
    tensors: int
    host_bytes: int

    @property
    def total(self) -> int:
        return sum(component.bytes for component in self.components)


def memory_of(config: Config, platform: Platform, processes: int) -> MemoryPlan:
    """The memory of each of `processes` processes in stage A. It takes seconds and allocates nothing."""
    train = config.train
    stage = zero_stage(train, processes)
    stored = count_parameters(config.model)
    experts = stored.stored["experts"] if "routing_mamba" not in config.model.mixers else 0
    here = stored.total_stored - experts + experts // train.expert_parallel
    everywhere = stored.total_stored
    shared = -(-everywhere // processes)  # the part of a process of the state that ZeRO partitions
    held = shared if stage == 3 else here
    accumulation = max(1, train.batch_rows // (train.micro_batch_rows * processes))
    step = trace(config, platform, zero_stage=stage, accumulation=accumulation)

    parts = [Component("weights", FP32 * held, "float32" + (f", 1/{processes} (ZeRO 3)" if stage == 3 else ""))]
    if stage > 0:
        parts.append(Component("masters", FP32 * shared, f"the float32 copy of ZeRO, 1/{processes}"))
    moments = shared if stage > 0 else here
    parts.append(
        Component("optimizer", 2 * FP32 * moments, "the two moments of AdamW" + (f", 1/{processes}" if stage else ""))
    )
    parts += _gradients(stage, here, shared, accumulation, processes)
    if train.ema_decay is not None:
        parts.append(Component("average", FP32 * held, "the moving average of the weights"))
    elsewhere = experts - experts // train.expert_parallel  # parameters of the trace that are not in this process
    if step.copies:
        copies = step.copies - BYTES_16_BIT * elsewhere
        parts.append(Component("copies", copies, f"of the weights in {train.precision}"))
    saved = step.total_saved
    rows = f"{train.micro_batch_rows} x {config.data.row_length} tokens"
    how = ", only the inputs of the blocks" if train.activation_checkpointing else ""
    parts.append(Component("activations", saved, f"saved by the forward pass of {rows}{how}"))
    # In a step with one micro-batch, gradients are allocated while activations are freed: the trace includes them.
    traced_gradients = FP32 * elsewhere if stage < 2 and accumulation == 1 else 0
    working = max(0, step.peak - saved - traced_gradients)
    parts.append(Component("working", working, "additional peak of the passes"))
    parts += _buffers(stage, config, here, processes)
    tensors = sum(part.bytes for part in parts)
    if platform == "cpu":
        parts.append(Component("runtime", CPU_RUNTIME, "Python, PyTorch, DeepSpeed and compiled kernels, resident"))
        return MemoryPlan(tuple(parts), step.saved, tensors, 0)
    runtime = GPU_RUNTIME + (NCCL_BUFFERS if processes > 1 else 0)
    parts.append(Component("runtime", runtime, "context and libraries: assumed, not measured"))
    parts.append(
        Component("fragments", int(FRAGMENTATION_SHARE * step.peak), "gaps of the allocator: assumed, not measured")
    )
    building = FP32 * here
    gathered = FP32 * everywhere * (1 + (2 if stage == 0 else 0) + (train.ema_decay is not None))
    return MemoryPlan(tuple(parts), step.saved, tensors, max(building, gathered))


def _gradients(stage: int, here: int, shared: int, accumulation: int, processes: int) -> Iterator[Component]:
    if stage < 2:
        if accumulation > 1:
            yield Component("gradients", FP32 * here, "float32, accumulated over the micro-batches")
        # Otherwise they are allocated while activations are freed: the trace includes them.
    elif stage == 2:
        copies, why = (2, "accumulated, and of the micro-batch") if accumulation > 1 else (1, "of the micro-batch")
        yield Component("gradients", copies * FP32 * shared, f"float32, 1/{processes}, {why}")
    else:
        yield Component("gradients", FP32 * shared, f"float32, 1/{processes}")


def _buffers(stage: int, config: Config, here: int, processes: int) -> Iterator[Component]:
    if processes == 1 and stage == 0:
        return
    if stage < 3:
        held = IN_FLIGHT if stage < 2 else 1
        yield Component("buffers", held * FP32 * min(BUCKET, here), "buckets of gradients to be reduced")
        return
    model, ffn = config.model, config.model.feed_forward
    widening = 3 if ffn.activation == "swiglu" else 2
    largest = widening * model.d_model * ffn.hidden
    if ffn.kind == "moe":
        largest *= ffn.experts // config.train.expert_parallel
    largest = max(largest, model.vocab_size * model.d_model)
    live = min(here, max(MOST_LIVE, largest))
    why = "gathered weights, and gradients of the largest module"
    yield Component("gathered", FP32 * (live + largest), why)
    yield Component(
        "buffers", 2 * FP32 * min(BUCKET, here), "prefetch buckets of weights and reduction buckets of gradients"
    )
