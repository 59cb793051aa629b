"""Rules about the section `model` of a model of cdrmix: mixers, widths, experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from cdrmix.config.rule import Rule, Violation, known, registered_name
from cdrmix.registry import nearest

Layers = Mapping[str, list[int]]  # model.mixer_layers
ATTENTION = ("model.attention_fraction", "model.mixer_layers")  # they decide which layers use attention
WIDTH = ("model.mamba.expand", "model.d_model")


def _has_attention(fraction: float, layers: Layers) -> bool:
    return fraction > 0 or bool(layers.get("attention"))


def _has_mamba(layers: Layers) -> bool:
    return bool(layers.get("mamba2") or layers.get("routing_mamba"))


def _heads(heads: int, width: int, fraction: float, layers: Layers) -> str | None:
    return f"must divide model.d_model={width}" if _has_attention(fraction, layers) and width % heads else None


def _rope(rope: bool, width: int, heads: int, fraction: float, layers: Layers) -> str | None:
    odd = _has_attention(fraction, layers) and width % heads == 0 and width // heads % 2 == 1
    return (
        f"false, or an even head width; model.d_model/model.attention.heads is {width // heads}"
        if rope and odd
        else None
    )


def _kv_heads(kv_heads: int, heads: int, fraction: float, layers: Layers) -> str | None:
    divides = heads % kv_heads == 0
    return None if divides or not _has_attention(fraction, layers) else f"must divide model.attention.heads={heads}"


def _head_size(head_size: int, width: int, fraction: float, layers: Layers) -> str | None:
    has_rwkv = fraction < 1 or layers.get("rwkv7")
    return f"must divide model.d_model={width}" if has_rwkv and width % head_size else None


def _mixer_layers(mixers: Layers, layers: int) -> Violation | None:
    names = known("mixer")
    assigned: set[int] = set()
    for mixer, chosen in mixers.items():
        if mixer not in names:
            close = nearest(mixer, names)
            suggestion = f"model.mixer_layers.{close}" if close else None
            return Violation((mixer,), f"one of the mixers {', '.join(names)}", suggestion, "unknown mixer")
        for index, layer in enumerate(chosen):
            if layer >= layers:
                return Violation(
                    (mixer, index), f"at most {layers - 1}: layers count from 0, and model.layers={layers}"
                )
            if layer in assigned:
                return Violation((mixer, index), "each layer once in all of model.mixer_layers")
            assigned.add(layer)
    return None


def _mamba_head_dim(head_dim: int, expand: int, width: int, layers: Layers) -> str | None:
    inner = expand * width
    return (
        f"must divide model.mamba.expand * model.d_model={inner}" if _has_mamba(layers) and inner % head_dim else None
    )


def _mamba_groups(groups: int, head_dim: int, expand: int, width: int, layers: Layers) -> str | None:
    heads, rest = divmod(expand * width, head_dim)
    wrong = _has_mamba(layers) and not rest and heads % groups
    return f"must divide model.mamba.expand * model.d_model / model.mamba.head_dim={heads}" if wrong else None


def _top_k(top_k: int, experts: int, kind: str, layers: Layers) -> str | None:
    routes = kind == "moe" or layers.get("routing_mamba")
    return f"at most model.feed_forward.experts={experts}" if routes and top_k > experts else None


def _activation(activation: str, kind: str) -> str | None:
    return "relu2, for model.feed_forward.kind=channel_mix" if kind == "channel_mix" and activation != "relu2" else None


def _dense_layers(dense: list[int], layers: int, kind: str) -> Violation | None:
    if dense and kind != "moe":
        return Violation((), f"[] for model.feed_forward.kind={kind}, which has no mixture of experts")
    for index, layer in enumerate(dense):
        if layer >= layers:
            return Violation((index,), f"at most {layers - 1}: layers count from 0, and model.layers={layers}")
        if layer in dense[:index]:
            return Violation((index,), "each layer once in model.feed_forward.dense_layers")
    return None


def _dense_hidden(hidden: int | None, dense: list[int]) -> str | None:
    return "null without model.feed_forward.dense_layers" if hidden is not None and not dense else None


def _shared_hidden(hidden: int | None, kind: str) -> str | None:
    return f"null for model.feed_forward.kind={kind}" if hidden is not None and kind != "moe" else None


def _depth_of_feed_forward(part: str, kind: str) -> str | None:
    if part == "mixer" or kind in ("moe", "dense"):
        return None
    return f"mixer, or model.feed_forward.kind moe or dense: {kind} does not skip tokens"


def _depth_of_mixers(part: str, reasoning: object) -> str | None:
    if part == "feed_forward" or reasoning is None:
        return None
    return "feed_forward in a run with a section reasoning: its adapters and memories read every token of a mixer"


def _prediction_weights(weights: list[float] | None, tokens: int) -> Violation | str | None:
    if weights is None:
        return None
    if len(weights) != tokens:
        return f"null, or model.prediction.tokens={tokens} weights"
    return None if weights[0] == 1 else Violation((0,), "1: the weight of the next token")


def _prediction_tokens(tokens: int, row_length: int) -> str | None:
    return f"at most data.row_length={row_length}, or the last depth has no targets" if tokens > row_length else None


def _prediction_heads(heads: str, prediction: object) -> str | None:
    return "drop without model.prediction" if heads == "keep" and prediction is None else None


def _prediction_mixer(
    mixer: str,
    kind: str,
    width: int,
    heads: int,
    kv_heads: int,
    rope: bool,
    head_size: int,
    expand: int,
    head_dim: int,
    groups: int,
) -> Violation | str | None:
    """Blocks of the depths may have a mixer that no layer has, whose widths no other rule checks then."""
    allowed = ("attention", "rwkv7", "mamba2")
    if mixer not in allowed:
        return Violation((), f"one of {', '.join(allowed)}", nearest(mixer, allowed))
    if kind != "sequential":
        return None
    if mixer == "rwkv7":
        return (
            f"another mixer, or model.rwkv.head_size that divides model.d_model={width}" if width % head_size else None
        )
    if mixer == "mamba2":
        ways, rest = divmod(expand * width, head_dim)
        fits = not rest and not ways % groups
        return None if fits else "another mixer, or model.mamba.head_dim and groups that divide the inner width"
    fits = not width % heads and not heads % kv_heads and not (rope and width // heads % 2)
    return None if fits else "another mixer, or model.attention.heads and kv_heads that divide model.d_model evenly"


def _detach(detach: bool, kind: str) -> str | None:
    return (
        "false, or another model.prediction.kind than shared, which has no parameters"
        if (detach and kind == "shared")
        else None
    )


RULES = (
    Rule(("model.mixer_layers", "model.layers"), _mixer_layers),
    Rule(("model.feed_forward.kind",), partial(registered_name, "feed-forward")),
    Rule(("model.attention.heads", "model.d_model", *ATTENTION), _heads),
    Rule(("model.attention.rope", "model.d_model", "model.attention.heads", *ATTENTION), _rope),
    Rule(("model.attention.kv_heads", "model.attention.heads", *ATTENTION), _kv_heads),
    Rule(("model.rwkv.head_size", "model.d_model", *ATTENTION), _head_size),
    Rule(("model.mamba.head_dim", *WIDTH, "model.mixer_layers"), _mamba_head_dim),
    Rule(("model.mamba.groups", "model.mamba.head_dim", *WIDTH, "model.mixer_layers"), _mamba_groups),
    Rule(
        ("model.feed_forward.top_k", "model.feed_forward.experts", "model.feed_forward.kind", "model.mixer_layers"),
        _top_k,
    ),
    Rule(("model.feed_forward.activation", "model.feed_forward.kind"), _activation),
    Rule(("model.feed_forward.dense_layers", "model.layers", "model.feed_forward.kind"), _dense_layers),
    Rule(("model.feed_forward.dense_hidden", "model.feed_forward.dense_layers"), _dense_hidden),
    Rule(("model.feed_forward.shared_hidden", "model.feed_forward.kind"), _shared_hidden),
    Rule(("model.depth.part", "model.feed_forward.kind"), _depth_of_feed_forward),
    Rule(("model.depth.part", "reasoning"), _depth_of_mixers),
    Rule(("model.prediction.weights", "model.prediction.tokens"), _prediction_weights),
    Rule(("model.prediction.tokens", "data.row_length"), _prediction_tokens),
    Rule(("export.prediction_heads", "model.prediction"), _prediction_heads),
    Rule(
        (
            *("model.prediction.mixer", "model.prediction.kind", "model.d_model", "model.attention.heads"),
            *("model.attention.kv_heads", "model.attention.rope", "model.rwkv.head_size", "model.mamba.expand"),
            *("model.mamba.head_dim", "model.mamba.groups"),
        ),
        _prediction_mixer,
    ),
    Rule(("model.prediction.detach", "model.prediction.kind"), _detach),
)
