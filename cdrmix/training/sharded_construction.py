"""Construction of a model under ZeRO-3: a process keeps its partition of each parameter as soon as it has values.

Every process draws every parameter, and holds one of them whole at a time. `deepspeed.zero.Init` around the
construction of the whole model does not work: modules read sizes of submodules that it has emptied by then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from cdrmix.config.schema import Config
from cdrmix.training.deepspeed_config import deepspeed_config
from cdrmix.training.distributed import join
from cdrmix.training.tensor_groups import TensorGroups
from cdrmix.training.zero import deepspeed_stage


def partitioner(config: Config, shares: TensorGroups | None = None) -> Callable[[nn.Module], None] | None:
    """What replaces the parameters of a module by this process's partitions of them; None below ZeRO-3.

    shares: of tensor parallelism; a share is partitioned over the processes that have the same one. Experts of expert
    parallelism are partitioned over the processes that have the same ones (`expert_layer`).
    """
    if not dist.is_initialized() or deepspeed_stage(config.train, dist.get_world_size()) < 3:
        return None
    import deepspeed  # imported after distributed.join has chosen the accelerator

    settings = deepspeed_config(config, join(config))

    def partition(module: nn.Module) -> None:
        copies = None if shares is None else shares.copies
        deepspeed.zero.Init(module=module, config_dict_or_path=settings, data_parallel_group=copies, mpu=shares)

    return partition
