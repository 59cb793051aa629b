"""The ZeRO stage of a run: what `train.zero_stage: auto` means, and which stages are refused with one process."""

from __future__ import annotations

from typing import Literal

from cdrmix.config.schema_training import Train
from cdrmix.errors import ConfigError

Stage = Literal[0, 1, 2, 3]


def zero_stage(train: Train, processes: int) -> Stage:
    """The stage of a run of so many processes. auto: 0 for one process, 1 for several, or what the memory mode needs.
    Processes that divide a model (`Train.parts`) count as one: each weight is in one of them.

    With one process there is nothing to shard, and ZeRO would keep a second copy of the weights. With several, stage 1
    shards the optimizer's state and sums gradients once a step, as without ZeRO. Stages 2 and 3 communicate in every
    micro-batch, so they are used only when named or needed. `train.offload` needs stage 2, or 3 for all.
    `train.weights: bf16` needs ZeRO, which keeps the float32 weights; with one process, stage 2 needs the least memory.
    """
    if train.zero_stage != "auto":
        return train.zero_stage
    if train.offload != "none":
        return 3 if train.offload == "all" else 2
    if processes == train.parts:
        return 2 if train.weights == "bf16" else 0
    return 1


def shards_whole_parameters(train: Train, processes: int) -> bool:
    """Whether stage 1 shards the optimizer's state by whole parameters (`owners.py`): Muon needs whole matrices.

    DeepSpeed, whose stage 1 divides parameters, then runs at stage 0.
    """
    return processes > 1 and train.optimizer.kind == "muon" and zero_stage(train, processes) == 1


def deepspeed_stage(train: Train, processes: int) -> Stage:
    """The ZeRO stage of the DeepSpeed engine."""
    return 0 if shards_whole_parameters(train, processes) else zero_stage(train, processes)


def check_zero_stage(train: Train, processes: int) -> None:
    """Raises ConfigError for ZeRO with one process, or as many as divide a model, where it shards nothing and costs
    memory and time.

    Not for bf16 weights and offload, which are modes of ZeRO.
    """
    modes = train.weights == "bf16" or train.offload != "none"
    if processes == train.parts and zero_stage(train, processes) > 0 and not modes:
        keys = ("tensor_parallel", "pipeline_parallel")
        why = "".join(f" and train.{key}={getattr(train, key)}" for key in keys if getattr(train, key) > 1)
        alone = "one process" if processes == 1 else f"{processes} processes{why}"
        raise ConfigError(
            f"train.zero_stage: {train.zero_stage} shards nothing with {alone}, and keeps a second copy of all "
            "weights and gradients. Set it to auto or 0, or start more processes (--nproc; for plan: --gpus)"
        )
