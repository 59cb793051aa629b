"""Conflicts of models of transformers, adapters, exports, and the model that a training starts from."""

from __future__ import annotations

from collections.abc import Iterator

from cdrmix.config.conflicts.conflict import Conflict
from cdrmix.config.schema_huggingface import HuggingFaceModel, hub_name
from cdrmix.config.schema_run import Sections


def conflicts(config: Sections) -> Iterator[Conflict]:
    if isinstance(config.model, HuggingFaceModel):
        yield from _folder(config.model)
        yield from _adapters(config, config.model)
        yield from _only_of_ours(config, config.model.kind)
    else:
        yield from _only_of_transformers(config)
    yield from _exports(config)
    if config.train.start_made_by is not None and config.train.start_from is None:
        yield Conflict("train.start_made_by", "null, since train.start_from is null")


def _folder(model: HuggingFaceModel) -> Iterator[Conflict]:
    if (model.path is None) == (model.random is None):
        yield Conflict("model.path", "a folder, or null and model.random: one of the two")
    if model.made_by is not None and model.path is None:
        yield Conflict("model.made_by", "null, since model.path is null")
    if not model.online:
        return
    if model.made_by is not None:
        yield Conflict("model.online", "false with model.made_by, which makes the folder: one of the two")
    elif model.path is None or hub_name(model.path) is None:
        example = "models/nvidia/Minitron-8B-Base"
        allowed = f"false, or a model.path whose last two parts are a name on the hub, such as {example}"
        yield Conflict("model.online", allowed)


def _adapters(config: Sections, model: HuggingFaceModel) -> Iterator[Conflict]:
    lora, train = model.lora, config.train
    if lora is None:
        return
    if lora.quantize is not None and (train.zero_stage == 3 or train.offload == "all"):  # which is stage 3 too
        allowed = "null, or train.zero_stage below 3 and train.offload none or optimizer"
        yield Conflict("model.lora.quantize", allowed)
    if model.random is not None:
        yield Conflict("model.lora", "null with model.random: adapters need a trained model, named by model.path")
    elif model.vocab.add_tokens:
        # The vectors of new tokens would stay random: adapters do not train the embedding.
        yield Conflict("model.lora", "null with model.vocab.add_tokens, whose vectors adapters do not train")
    if lora.experts and lora.dropout > 0:
        yield Conflict("model.lora.dropout", "0 with model.lora.experts, whose inputs peft cannot drop")


def _only_of_ours(config: Sections, kind: str) -> Iterator[Conflict]:
    train = config.train
    refused = {
        "train.hyperparameters": ("none", train.hyperparameters != "none"),
        "train.tokens_per_parameter": ("null", train.tokens_per_parameter is not None),
        "train.compile": ("false", train.compile),
        "train.residual_dtype": ("null", train.residual_dtype is not None),
        "reasoning": ("null", config.reasoning is not None),
    }
    for key, (neutral, differs) in refused.items():
        if differs:
            yield Conflict(key, f"{neutral}, for model.kind={kind}")
    if train.start_from is not None:
        yield Conflict("train.start_from", f"null for model.kind={kind}; use model.path")


def _only_of_transformers(config: Sections) -> Iterator[Conflict]:
    if config.train.weights != "fp32":
        yield Conflict("train.weights", "fp32, for a model of cdrmix: its norms and routers need float32 weights")
    if config.export.weights != "fp32":
        yield Conflict("export.weights", "fp32, for a model of cdrmix")
    if config.export.lora != "merge":
        yield Conflict("export.lora", "merge, for a model of cdrmix")


def _exports(config: Sections) -> Iterator[Conflict]:
    if config.export.lora != "adapter":
        return
    if isinstance(config.model, HuggingFaceModel) and config.model.lora is None:
        yield Conflict("export.lora", "merge, without model.lora")
    if config.export.weights != "fp32":
        yield Conflict("export.weights", "fp32, or export.lora: merge; adapters alone are exported in float32")
