"""The ZeRO stage of a run: what `train.zero_stage: auto` means, and which stages are refused with one process."""

from __future__ import annotations

from typing import Literal

from cdrmix.config.schema import Train
from cdrmix.errors import ConfigError

Stage = Literal[0, 1, 2, 3]


def zero_stage(train: Train, processes: int) -> Stage:
    """The stage of a run of so many processes. auto: 0 for one process, 1 for several.

    With one process there is nothing to shard, and ZeRO would keep a second copy of the weights. With several, stage 1
    shards the optimizer's state and sums gradients once a step, as without ZeRO. Stages 2 and 3 communicate in every
    micro-batch, so they are used only when named.
    """
    if train.zero_stage == "auto":
        return 0 if processes == 1 else 1
    return train.zero_stage


def check_zero_stage(train: Train, processes: int) -> None:
    """Raises ConfigError for ZeRO with one process, where it shards nothing and costs memory and time."""
    if processes == 1 and zero_stage(train, processes) > 0:
        raise ConfigError(
            f"train.zero_stage: {train.zero_stage} shards nothing with one process, and keeps a second copy of all "
            "weights and gradients. Set it to auto or 0, or start several processes (--nproc; for plan: --gpus)"
        )
