"""The memory of training a model of transformers on each device: weights in 16 or 32 bits, ZeRO, offload, adapters.

The state is counted as in DeepSpeed 0.19, see `cdrmix/training/engine.py`. With N trained parameters and bf16 weights,
`train.offload: optimizer` needs 2 N bytes on the device and 18 N in main memory; `all` needs 22 N in main memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from cdrmix.config.schema import Config
from cdrmix.hf.foreign import section_of
from cdrmix.ops.backend import Platform
from cdrmix.plan.components import (
    CPU_RUNTIME,
    FP32,
    FRAGMENTATION_SHARE,
    GPU_RUNTIME,
    NCCL_BUFFERS,
    Component,
    MemoryPlan,
    gradients,
)
from cdrmix.plan.foreign import ForeignModelSize, foreign_size, foreign_trace
from cdrmix.training.engine import BUCKET, MOST_LIVE
from cdrmix.training.reduction import IN_FLIGHT
from cdrmix.training.zero import zero_stage


def foreign_memory_of(config: Config, platform: Platform, processes: int) -> MemoryPlan:
    """The memory of each of `processes` processes. It takes seconds and allocates nothing. Raises ConfigError."""
    train = config.train
    stage, size = zero_stage(train, processes), foreign_size(config)
    itemsize = 2 if train.weights == "bf16" else FP32
    shared = -(-size.trained // processes)  # the part of a process of the state that ZeRO partitions
    accumulation = max(1, train.batch_rows // (train.micro_batch_rows * processes))
    step, traced = foreign_trace(config, platform, gradients_stay=stage >= 2 or accumulation > 1)

    parts = [
        Component("weights", size.weight_bytes // (processes if stage == 3 else 1), _dtypes(config, stage, processes))
    ]
    moved, offloaded = [], 0  # bytes in main memory
    if stage > 0:
        moved.append(Component("masters", FP32 * shared, f"float32 weights of ZeRO, 1/{processes}"))
    moments = shared if stage > 0 else size.trained
    moved.append(
        Component("optimizer", 2 * FP32 * moments, "the two moments of AdamW" + (f", 1/{processes}" if stage else ""))
    )
    if train.offload == "none" or platform == "cpu":
        parts += moved
        parts += gradients(stage, size.trained, shared, accumulation, processes)
    else:
        offloaded = sum(part.bytes for part in moved)
        # Gradients; at stage 2 a copy of the weights on their way to the device, at stage 3 sums over micro-batches.
        offloaded += (FP32 + (itemsize if stage == 2 else FP32)) * shared
        if train.offload == "all":
            offloaded += parts.pop().bytes
    if train.ema_decay is not None:
        parts.append(
            Component("average", FP32 * (shared if stage == 3 else size.trained), "the average of the weights")
        )
    rows = f"{train.micro_batch_rows} x {config.data.row_length} tokens"
    how = ", inputs of the blocks" if train.activation_checkpointing else ""
    source = "traced" if traced else "estimated by a formula"
    parts.append(Component("activations", step.total_saved, f"saved by the forward pass of {rows}{how}; {source}"))
    parts.append(Component("working", max(0, step.peak - step.total_saved), f"additional peak of the passes; {source}"))
    parts += _buffers(stage, size, itemsize, processes)
    tensors = sum(part.bytes for part in parts)
    if platform == "cpu":
        parts.append(Component("runtime", CPU_RUNTIME, "Python, PyTorch, DeepSpeed and compiled kernels, resident"))
        return MemoryPlan(tuple(parts), step.saved, tensors, 0)
    runtime = GPU_RUNTIME + (NCCL_BUFFERS if processes > 1 else 0)
    parts.append(Component("runtime", runtime, "context and libraries: assumed, not measured"))
    fragments = int(FRAGMENTATION_SHARE * step.peak)
    parts.append(Component("fragments", fragments, "gaps of the allocator: assumed, not measured"))
    gathered = FP32 * size.trained * (1 + (2 if stage == 0 else 0) + (train.ema_decay is not None))
    return MemoryPlan(tuple(parts), step.saved, tensors, offloaded + max(size.weight_bytes, gathered))


def _dtypes(config: Config, stage: int, processes: int) -> str:
    lora = section_of(config).lora
    names = "bf16" if config.train.weights == "bf16" else "float32"
    if lora is not None:
        names = f"frozen, {'nf4 and ' if lora.quantize else ''}{names}, and adapters"
    return names + (f", 1/{processes} (ZeRO 3)" if stage == 3 else "")


def _buffers(stage: int, size: ForeignModelSize, itemsize: int, processes: int) -> Iterator[Component]:
    if processes == 1 and stage == 0:
        return
    if stage < 3:
        held = IN_FLIGHT if stage < 2 else 1
        yield Component("buffers", held * itemsize * min(BUCKET, size.trained), "buckets of gradients to be reduced")
        return
    live = min(size.total_stored, max(MOST_LIVE, size.largest))
    gradient = min(size.largest, size.trained)
    yield Component("gathered", itemsize * (live + gradient), "gathered weights, and the largest gradient")
    buckets = min(BUCKET, size.total_stored) + min(BUCKET, size.trained)
    yield Component("buffers", itemsize * buckets, "prefetch buckets of weights and reduction buckets of gradients")
