"""Conflicts in the section `model` of a model of cdrmix: mixers, widths, experts, further predictions."""

from __future__ import annotations

from collections.abc import Iterator

from cdrmix.config.conflicts.conflict import Conflict, unknown_name
from cdrmix.config.names import known
from cdrmix.config.schema_model import Model
from cdrmix.config.schema_run import Sections
from cdrmix.registry import nearest

PREDICTION_MIXERS = ("attention", "rwkv7", "mamba2")


def has_attention(model: Model) -> bool:
    return model.attention_fraction > 0 or bool(model.mixer_layers.get("attention"))


def has_rwkv7(model: Model) -> bool:
    return model.attention_fraction < 1 or bool(model.mixer_layers.get("rwkv7"))


def has_mamba(model: Model) -> bool:
    return bool(model.mixer_layers.get("mamba2") or model.mixer_layers.get("routing_mamba"))


def conflicts(config: Sections) -> Iterator[Conflict]:
    if config.model.kind == "cdrmix":
        if config.export.prediction_heads == "keep" and config.model.prediction is None:
            yield Conflict("export.prediction_heads", "drop without model.prediction")
        yield from _layers(config.model)
        yield from _widths(config.model)
        yield from _feed_forward(config.model)
        yield from _depth(config, config.model)
        yield from _prediction(config, config.model)


def _layers(model: Model) -> Iterator[Conflict]:
    key, names, last = "model.mixer_layers", known("mixer"), model.layers - 1
    assigned: set[int] = set()
    for mixer, chosen in model.mixer_layers.items():
        if mixer not in names:
            close = nearest(mixer, names)
            suggestion = f"{key}.{close}" if close else None
            yield Conflict(key, f"one of the mixers {', '.join(names)}", (mixer,), suggestion, "unknown mixer")
            return
        for index, layer in enumerate(chosen):
            if layer > last:
                allowed = f"at most {last}: layers count from 0, and model.layers={model.layers}"
                yield Conflict(key, allowed, (mixer, index))
                return
            if layer in assigned:
                yield Conflict(key, "each layer once in all of model.mixer_layers", (mixer, index))
                return
            assigned.add(layer)


def _widths(model: Model) -> Iterator[Conflict]:
    width, heads, kv_heads = model.d_model, model.attention.heads, model.attention.kv_heads
    if has_attention(model):
        if width % heads:
            yield Conflict("model.attention.heads", f"must divide model.d_model={width}")
        elif model.attention.rope and width // heads % 2:
            allowed = f"false, or an even head width; model.d_model/model.attention.heads is {width // heads}"
            yield Conflict("model.attention.rope", allowed)
        if heads % kv_heads:
            yield Conflict("model.attention.kv_heads", f"must divide model.attention.heads={heads}")
    if has_rwkv7(model) and width % model.rwkv.head_size:
        yield Conflict("model.rwkv.head_size", f"must divide model.d_model={width}")
    if has_mamba(model):
        inner = model.mamba.expand * width
        if inner % model.mamba.head_dim:
            yield Conflict("model.mamba.head_dim", f"must divide model.mamba.expand * model.d_model={inner}")
        elif (count := inner // model.mamba.head_dim) % model.mamba.groups:
            allowed = f"must divide model.mamba.expand * model.d_model / model.mamba.head_dim={count}"
            yield Conflict("model.mamba.groups", allowed)


def _feed_forward(model: Model) -> Iterator[Conflict]:
    section, prefix, last = model.feed_forward, "model.feed_forward", model.layers - 1
    if unknown := unknown_name(f"{prefix}.kind", "feed-forward", section.kind):
        yield unknown
    routes = section.kind == "moe" or model.mixer_layers.get("routing_mamba")
    if routes and section.top_k > section.experts:
        yield Conflict(f"{prefix}.top_k", f"at most {prefix}.experts={section.experts}")
    if section.kind == "channel_mix" and section.activation != "relu2":
        yield Conflict(f"{prefix}.activation", f"relu2, for {prefix}.kind=channel_mix")
    if section.dense_layers and section.kind != "moe":
        allowed = f"[] for {prefix}.kind={section.kind}, which has no mixture of experts"
        yield Conflict(f"{prefix}.dense_layers", allowed)
    else:
        for index, layer in enumerate(section.dense_layers):
            if layer > last:
                allowed = f"at most {last}: layers count from 0, and model.layers={model.layers}"
                yield Conflict(f"{prefix}.dense_layers", allowed, (index,))
                break
            if layer in section.dense_layers[:index]:
                yield Conflict(f"{prefix}.dense_layers", f"each layer once in {prefix}.dense_layers", (index,))
                break
    if section.dense_hidden is not None and not section.dense_layers:
        yield Conflict(f"{prefix}.dense_hidden", f"null without {prefix}.dense_layers")
    if section.shared_hidden is not None and section.kind != "moe":
        yield Conflict(f"{prefix}.shared_hidden", f"null for {prefix}.kind={section.kind}")


def _depth(config: Sections, model: Model) -> Iterator[Conflict]:
    if model.depth is None:
        return
    part, kind = model.depth.part, model.feed_forward.kind
    if part != "mixer" and kind not in ("moe", "dense"):
        allowed = f"mixer, or model.feed_forward.kind moe or dense: {kind} does not skip tokens"
        yield Conflict("model.depth.part", allowed)
    if part != "feed_forward" and config.reasoning is not None:
        allowed = (
            "feed_forward in a run with a section reasoning: its adapters and memories read every token of a mixer"
        )
        yield Conflict("model.depth.part", allowed)


def _prediction(config: Sections, model: Model) -> Iterator[Conflict]:
    section, prefix = model.prediction, "model.prediction"
    if section is None:
        return
    if section.weights is not None and len(section.weights) != section.tokens:
        yield Conflict(f"{prefix}.weights", f"null, or {prefix}.tokens={section.tokens} weights")
    elif section.weights is not None and section.weights[0] != 1:
        yield Conflict(f"{prefix}.weights", "1: the weight of the next token", (0,))
    if section.tokens > (length := config.data.row_length):
        allowed = f"at most data.row_length={length}, or the last depth has no targets"
        yield Conflict(f"{prefix}.tokens", allowed)
    if section.detach and section.kind == "shared":
        allowed = f"false, or another {prefix}.kind than shared, which has no parameters"
        yield Conflict(f"{prefix}.detach", allowed)
    if section.mixer not in PREDICTION_MIXERS:
        close = nearest(section.mixer, PREDICTION_MIXERS)
        yield Conflict(f"{prefix}.mixer", f"one of {', '.join(PREDICTION_MIXERS)}", nearest=close)
    elif section.kind == "sequential" and (allowed_mixer := _mixer_of_a_depth(model, section.mixer)):
        yield Conflict(f"{prefix}.mixer", allowed_mixer)


def _mixer_of_a_depth(model: Model, mixer: str) -> str | None:
    """Blocks of the depths may have a mixer that no layer has, whose widths nothing else checks then."""
    width, attention, mamba = model.d_model, model.attention, model.mamba
    if mixer == "rwkv7" and width % model.rwkv.head_size:
        return f"another mixer, or model.rwkv.head_size that divides model.d_model={width}"
    heads, rest = divmod(mamba.expand * width, mamba.head_dim)
    if mixer == "mamba2" and (rest or heads % mamba.groups):
        return "another mixer, or model.mamba.head_dim and groups that divide the inner width"
    uneven = width % attention.heads or attention.heads % attention.kv_heads
    if mixer == "attention" and (uneven or (attention.rope and width // attention.heads % 2)):
        return "another mixer, or model.attention.heads and kv_heads that divide model.d_model evenly"
    return None
