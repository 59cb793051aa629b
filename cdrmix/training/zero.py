"""Which ZeRO stage a run has: what `train.zero_stage: auto` means, and which stages one process is refused."""

from __future__ import annotations

from typing import Literal

from cdrmix.config.schema import Train
from cdrmix.errors import ConfigError

Stage = Literal[0, 1, 2, 3]


def zero_stage(train: Train, processes: int) -> Stage:
    """The stage of a run of so many processes. auto: 0 for one process, 1 for several.

    One process has nobody to share out with, and ZeRO would still keep a second copy of the weights. Several share the
    optimizer's state out at stage 1 and add their gradients up once a step, as without ZeRO; stages 2 and 3 send more,
    every micro-batch, so who needs them asks for them.
    """
    if train.zero_stage == "auto":
        return 0 if processes == 1 else 1
    return train.zero_stage


def check_zero_stage(train: Train, processes: int) -> None:
    """Raises ConfigError for a stage that shares nothing out, as in one process, and only takes memory and time."""
    if processes == 1 and zero_stage(train, processes) > 0:
        raise ConfigError(
            f"train.zero_stage: {train.zero_stage} shares nothing out in one process, and keeps a second copy of all "
            "weights and of the gradients; set it to auto or 0, or start several processes (--nproc; plan: --gpus)"
        )
