"""Builds the model that a configuration trains, with its loss."""

from __future__ import annotations

from cdrmix.config.schema import Config
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.loss import LossModel
from cdrmix.training.compiling import compile_blocks
from cdrmix.training.expert_parallel import expert_layer


def narrow_residual(config: Config) -> bool:
    """Whether the residual stream is bfloat16. The range of float16 is too small for it."""
    return config.train.precision == "bf16" and config.train.residual_dtype != "fp32"


def build_loss_model(config: Config) -> LossModel:
    """The model with its loss, with this process's experts. Weights are drawn from torch's global generator."""
    model = LanguageModel(
        config.cdrmix_model,
        activation_checkpointing=config.train.activation_checkpointing,
        experts=expert_layer(config),
        narrow_residual=narrow_residual(config),
    )
    if config.train.compile:
        compile_blocks(model)
    return LossModel(model)
