"""Builds the model that a configuration trains, with its loss."""

from __future__ import annotations

import torch.distributed as dist

from cdrmix.config.schema import Config
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.loss import LossModel
from cdrmix.model.sequence import SequenceGroup
from cdrmix.training.compiling import compile_blocks
from cdrmix.training.expert_parallel import expert_layer
from cdrmix.training.groups import neighbours, new_group, world_of
from cdrmix.training.pipeline import PipelineGroups
from cdrmix.training.sharded_construction import partitioner
from cdrmix.training.tensor_groups import TensorGroups


def narrow_residual(config: Config) -> bool:
    """Whether the residual stream is bfloat16. The range of float16 is too small for it."""
    return config.train.precision == "bf16" and config.train.residual_dtype != "fp32"


def build_loss_model(config: Config) -> LossModel:
    """The model with its loss: with this process's experts, its share of the weights of tensor parallelism, its stage
    of a pipeline, and under ZeRO-3 its partitions of all weights.

    The weights depend on one number from torch's global generator.
    """
    shares = TensorGroups.make(config)
    model = LanguageModel(
        config.cdrmix_model,
        activation_checkpointing=config.train.activation_checkpointing,
        experts=expert_layer(config),
        narrow_residual=narrow_residual(config),
        tensor=shares,
        partition=partitioner(config, shares),
        stage=PipelineGroups.make(config),
    )
    if config.train.compile:
        compile_blocks(model)
    return LossModel(model, sequence_group(config))


def sequence_group(config: Config) -> SequenceGroup | None:
    """The processes that share the tokens of this process's rows; None with train.sequence_parallel 1. Every process
    calls."""
    size, apart = config.train.sequence_parallel, config.train.tensor_parallel
    if size == 1:
        return None
    world = world_of("sequence_parallel", size, size * apart)
    # As DistributedContext.loader_ranks has it: processes that divide the layers are neighbours.
    group = new_group([rows[share::apart] for rows in neighbours(world, size * apart) for share in range(apart)])
    return SequenceGroup(group, dist.get_rank(group), size)
