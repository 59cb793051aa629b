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
    FP32,
    Component,
    MemoryPlan,
    checkpoint_bytes,
    lasting_state,
    memory_plan,
    micro_batches,
    passes,
)
from cdrmix.plan.foreign import ForeignModelSize, foreign_size, foreign_trace
from cdrmix.training.deepspeed_config import BUCKET, MOST_LIVE
from cdrmix.training.reduction import IN_FLIGHT
from cdrmix.training.zero import zero_stage


def foreign_memory_of(config: Config, platform: Platform, processes: int) -> MemoryPlan:
    """The memory of each of `processes` processes. It takes seconds and allocates nothing. Raises ConfigError."""
    train = config.train
    stage, size = zero_stage(train, processes), foreign_size(config)
    itemsize = 2 if train.weights == "bf16" else FP32
    shared = -(-size.trained // processes)  # the part of a process of the state that ZeRO partitions
    gradients_stay = stage >= 2 or micro_batches(train, processes) > 1
    step, untraced = foreign_trace(config, platform, gradients_stay=gradients_stay, stage=stage)
    weights = Component(
        "weights", size.weight_bytes // (processes if stage == 3 else 1), _dtypes(config, stage, processes)
    )
    parts, offloaded = lasting_state(
        train, platform, stage, processes, weights=weights, here=size.trained, shared=shared, itemsize=itemsize
    )
    parts += passes(config, step, source="; estimated by a formula" if untraced else "; traced")
    parts += _buffers(stage, size, itemsize, processes)
    host_bytes = offloaded + max(size.weight_bytes, checkpoint_bytes(train, processes, size.trained))
    return memory_plan(parts, step, platform, processes, host_bytes, untraced)


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
