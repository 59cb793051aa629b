"""Rules about models of transformers, adapters, exports, and the model that a training starts from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cdrmix.config.hyperparameters import COUNTING_KEYS
from cdrmix.config.rule import Rule
from cdrmix.config.schema_huggingface import hub_name

FLOAT32 = ": its norms and routers need float32 weights"


def _path_or_random(path: str | None, random: object) -> str | None:
    return None if (path is None) != (random is None) else "a folder, or null and model.random: one of the two"


def _made_by(key: str, made_by: str | None, path: str | None) -> str | None:
    return f"null, since {key} is null" if made_by is not None and path is None else None


def _online(online: bool, path: str | None, made_by: str | None) -> str | None:
    if not online:
        return None
    if made_by is not None:
        return "false with model.made_by, which makes the folder: one of the two"
    if path is None or hub_name(path) is None:
        return (
            "false, or a model.path whose last two parts are a name on the hub, such as models/nvidia/Minitron-8B-Base"
        )
    return None


def _quantize(quantize: str | None, stage: int | str, offload: str) -> str | None:
    refused = quantize is not None and (stage == 3 or offload == "all")  # which is stage 3 too
    return "null, or train.zero_stage below 3 and train.offload none or optimizer" if refused else None


def _trained_base(lora: object, random: object, add_tokens: Sequence[str]) -> str | None:
    if lora is None:
        return None
    if random is not None:
        return "null with model.random: adapters need a trained model, named by model.path"
    # The vectors of new tokens would stay random: adapters do not train the embedding.
    return "null with model.vocab.add_tokens, whose vectors adapters do not train" if add_tokens else None


def _expert_dropout(dropout: float, experts: bool) -> str | None:
    return "0 with model.lora.experts, whose inputs peft cannot drop" if experts and dropout > 0 else None


def _only_of_ours(neutral: object, value: object, kind: str) -> str | None:
    shown = "null" if neutral is None else str(neutral).lower()
    return f"{shown}, for model.kind={kind}" if kind != "cdrmix" and value not in (None, neutral) else None


def _only_of_transformers(allowed: str, value: str, kind: str, *, reason: str = "") -> str | None:
    return f"{allowed}, for a model of cdrmix{reason}" if kind == "cdrmix" and value != allowed else None


def _export_lora(form: str, lora: object) -> str | None:
    return "merge, without model.lora" if form == "adapter" and lora is None else None


def _export_weights(weights: str, form: str) -> str | None:
    refused = weights != "fp32" and form == "adapter"
    return "fp32, or export.lora: merge; adapters alone are exported in float32" if refused else None


def _start_from(start: str | None, kind: str) -> str | None:
    refused = kind == "huggingface" and start is not None
    return "null for model.kind=huggingface; use model.path" if refused else None


RULES = (
    Rule(("model.path", "model.random"), _path_or_random),
    Rule(("model.made_by", "model.path"), partial(_made_by, "model.path")),
    Rule(("model.online", "model.path", "model.made_by"), _online),
    Rule(("model.lora.quantize", "train.zero_stage", "train.offload"), _quantize),
    Rule(("model.lora", "model.random", "model.vocab.add_tokens"), _trained_base),
    Rule(("model.lora.dropout", "model.lora.experts"), _expert_dropout),
    Rule(("train.expert_parallel", "model.kind"), partial(_only_of_ours, 1)),
    Rule(("train.sequence_parallel", "model.kind"), partial(_only_of_ours, 1)),
    Rule(("train.tensor_parallel", "model.kind"), partial(_only_of_ours, 1)),
    Rule(("train.pipeline_parallel", "model.kind"), partial(_only_of_ours, 1)),
    *(Rule((key, "model.kind"), partial(_only_of_ours, neutral)) for key, neutral in COUNTING_KEYS.items()),
    Rule(("train.compile", "model.kind"), partial(_only_of_ours, False)),
    Rule(("train.residual_dtype", "model.kind"), partial(_only_of_ours, None)),
    Rule(("train.start_from", "model.kind"), _start_from),
    Rule(("reasoning", "model.kind"), partial(_only_of_ours, None)),
    Rule(("train.weights", "model.kind"), partial(_only_of_transformers, "fp32", reason=FLOAT32)),
    Rule(("export.weights", "model.kind"), partial(_only_of_transformers, "fp32")),
    Rule(("export.lora", "model.kind"), partial(_only_of_transformers, "merge")),
    Rule(("export.lora", "model.lora"), _export_lora),
    Rule(("export.weights", "export.lora"), _export_weights),
    Rule(("train.start_made_by", "train.start_from"), partial(_made_by, "train.start_from")),
)
