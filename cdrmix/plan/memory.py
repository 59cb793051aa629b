"""The memory of training on each device, by component.

The state is counted as in DeepSpeed 0.19 with float32 parameters. Activations are traced (`trace`). A gigabyte is 10^9
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from cdrmix.config.schema import Config, Model
from cdrmix.ops.backend import Platform
from cdrmix.plan.components import (
    BYTES_16_BIT,
    CPU_RUNTIME,
    FP32,
    FRAGMENTATION_SHARE,
    GPU_RUNTIME,
    NCCL_BUFFERS,
    Component,
    MemoryPlan,
    gradients,
)
from cdrmix.plan.foreign_memory import foreign_memory_of
from cdrmix.plan.parameters import count_parameters
from cdrmix.plan.trace import trace
from cdrmix.training.engine import BUCKET, MOST_LIVE
from cdrmix.training.reduction import IN_FLIGHT
from cdrmix.training.zero import zero_stage


def memory_of(config: Config, platform: Platform, processes: int) -> MemoryPlan:
    """The memory of each of `processes` processes in stage A. It takes seconds and allocates nothing."""
    if not isinstance(config.model, Model):
        return foreign_memory_of(config, platform, processes)
    train = config.train
    stage = zero_stage(train, processes)
    stored = count_parameters(config.cdrmix_model)
    experts = stored.stored["experts"] if "routing_mamba" not in config.cdrmix_model.mixers else 0
    here = stored.total_stored - experts + experts // train.expert_parallel
    everywhere = stored.total_stored
    shared = -(-everywhere // processes)  # the part of a process of the state that ZeRO partitions
    held = shared if stage == 3 else here
    accumulation = max(1, train.batch_rows // (train.micro_batch_rows * processes))
    step = trace(config, platform, zero_stage=stage, accumulation=accumulation)

    offload = "none" if platform == "cpu" else train.offload
    offloaded = 0  # bytes in main memory

    parts = [Component("weights", FP32 * held, "float32" + (f", 1/{processes} (ZeRO 3)" if stage == 3 else ""))]
    if stage > 0:
        parts.append(Component("masters", FP32 * shared, f"the float32 copy of ZeRO, 1/{processes}"))
    moments = shared if stage > 0 else here
    parts.append(
        Component("optimizer", 2 * FP32 * moments, "the two moments of AdamW" + (f", 1/{processes}" if stage else ""))
    )
    if offload == "none":
        parts += gradients(stage, here, shared, accumulation, processes)
    else:  # a buffer of the size of the largest parameter, on the device and in main memory, is left out
        moved = ["masters", "optimizer"] + (["weights"] if offload == "all" else [])
        offloaded = sum(part.bytes for part in parts if part.name in moved)
        # Gradients; at stage 2 a copy of the weights on their way to the device, at stage 3 sums over micro-batches.
        offloaded += 2 * FP32 * shared
        parts = [part for part in parts if part.name not in moved]
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
    return MemoryPlan(tuple(parts), step.saved, tensors, offloaded + max(building, gathered))


def _buffers(stage: int, config: Config, here: int, processes: int) -> Iterator[Component]:
    if processes == 1 and stage == 0:
        return
    if stage < 3:
        held = IN_FLIGHT if stage < 2 else 1
        yield Component("buffers", held * FP32 * min(BUCKET, here), "buckets of gradients to be reduced")
        return
    model, ffn = config.cdrmix_model, config.cdrmix_model.feed_forward
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
