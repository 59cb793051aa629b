"""Builds the model of transformers that a configuration trains, with its loss."""

from __future__ import annotations

from typing import Any

import torch

from cdrmix.config.schema import Config
from cdrmix.config.schema_huggingface import HuggingFaceModel
from cdrmix.errors import ConfigError
from cdrmix.hf import adapters
from cdrmix.hf.foreign import (
    ForeignLossModel,
    base_model,
    check_sizes,
    quiet,
    section_of,
    transformers_config,
    vocabulary,
)
from cdrmix.training.deepspeed_config import deepspeed_config
from cdrmix.training.distributed import DistributedContext
from cdrmix.training.zero import zero_stage


def build_foreign(config: Config, world: DistributedContext) -> ForeignLossModel:
    """The model with its loss. Arguments and errors as of `make_model`."""
    return ForeignLossModel(make_model(config, world), section_of(config))


def make_model(config: Config, world: DistributedContext) -> Any:
    """The model that a configuration trains, with the weights that training begins with, in train.weights' dtype.

    With model.lora it has adapters, and all other weights are frozen. Under ZeRO-3 each process reads the files but
    keeps only its part of each weight. Random weights are drawn from torch's global generator, those of adapters by the
    seed of the run. Raises ConfigError.
    """
    section = section_of(config)
    # Weights that are trained keep their bits: only those that the files have in bfloat16 are read as bfloat16.
    frozen = section.lora is not None
    narrow = config.train.weights == "bf16" and (frozen or _stored_dtype(section) == torch.bfloat16)
    sharding = None
    if section.path is not None and not frozen and zero_stage(config.train, world.size) == 3:
        from transformers.integrations import HfDeepSpeedConfig

        check_sizes(section, transformers_config(section))  # a model that is made later would be divided
        sharding = HfDeepSpeedConfig(deepspeed_config(config, world))  # transformers looks for it while it is alive
    model = base_model(config, torch.bfloat16 if narrow else torch.float32)
    if sharding is None and world.device.type == "cpu" and not getattr(model, "is_quantized", False):
        for parameter in model.parameters():
            # It is the mapped file, where nothing is aligned, and products round by alignment. ZeRO aligns weights.
            parameter.data = parameter.data.clone()
    del sharding
    if section.lora is not None:
        adapters.add_adapters(model, section.lora, seed=config.run.seed, base=section.path)
    if config.train.activation_checkpointing:
        recompute_activations(model)
    return model.train()


def recompute_activations(model: Any) -> None:
    """Lets the backward pass recompute the activations of every layer. Raises ConfigError if the model cannot."""
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"train.activation_checkpointing: transformers has none for {model.config.model_type}; set it to false"
        )
    # transformers 5.23 has renamed it; the older name warns there.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def empty_model(config: Config) -> Any:
    """The model of `make_model` on the meta device, without values and without quantization, for a plan.

    It needs no weights: a plan may come before their download. Raises ConfigError.
    """
    section = section_of(config)
    described = transformers_config(section, with_weights=False)
    described.get_text_config().vocab_size = vocabulary(section).rows
    from transformers import AutoModelForCausalLM  # installed, as transformers_config has found

    dtype = torch.bfloat16 if config.train.weights == "bf16" else torch.float32
    options = {"attn_implementation": "eager"} if section.attention == "eager" else {}
    with quiet(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described, dtype=dtype, **options)
        if section.lora is not None:
            adapters.add_adapters(model, section.lora, seed=config.run.seed, base=section.path)
    return model


def _stored_dtype(section: HuggingFaceModel) -> torch.dtype | None:
    """The dtype that config.json gives for the weights in the files; None for random weights."""
    dtype = None if section.random is not None else transformers_config(section).get_text_config().dtype
    return dtype if isinstance(dtype, torch.dtype) else None
