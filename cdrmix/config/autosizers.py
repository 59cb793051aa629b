"""The autosizers: `model.size` sets the keys of a configuration that the file does not write.

Input and output are nested data that nobody has validated yet. The autosizers skip what is missing or malformed, and
the schema reports it. So nothing here raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Size = Literal["1b", "4b", "40b", "200b"]

# Keys that are derived from another key. If that key is missing, only that key is reported.
DERIVED_FROM = {"model.rwkv": "model.d_model", "model.attention.kv_heads": "model.attention.heads"}


@dataclass(frozen=True)
class Scale:
    """The values that one model size sets. Widths in elements, horizons in controller steps."""

    # the core model
    d_model: int
    layers: int
    heads: int  # each head has a width of 128
    expert_hidden: int
    init_std_scale: float
    gradient_clip: float
    # the reasoning model on top of it
    lora_rank: int
    lora_alpha: float
    lora_decay: float  # of the fast weights, each controller step
    step_budget: int
    max_branches: int
    memory_dim: int
    memory_top_k: int
    memory_tokens: int
    horizon: int
    latency_weight: float
    stability_weight: float


SCALES: dict[Size, Scale] = {
    "1b": Scale(
        d_model=2048, layers=24, heads=16, expert_hidden=4608, init_std_scale=1.0, gradient_clip=1.0,
        lora_rank=8, lora_alpha=0.20, lora_decay=0.98, step_budget=64, max_branches=3,
        memory_dim=512, memory_top_k=4, memory_tokens=16_384,
        horizon=256, latency_weight=0.01, stability_weight=0.10,
    ),
    "4b": Scale(
        d_model=3072, layers=36, heads=24, expert_hidden=8192, init_std_scale=1.0, gradient_clip=1.0,
        lora_rank=12, lora_alpha=0.18, lora_decay=0.985, step_budget=96, max_branches=3,
        memory_dim=640, memory_top_k=6, memory_tokens=32_768,
        horizon=384, latency_weight=0.01, stability_weight=0.10,
    ),
    "40b": Scale(
        d_model=6144, layers=64, heads=48, expert_hidden=16384, init_std_scale=0.9, gradient_clip=0.9,
        lora_rank=16, lora_alpha=0.16, lora_decay=0.99, step_budget=128, max_branches=4,
        memory_dim=768, memory_top_k=8, memory_tokens=131_072,
        horizon=512, latency_weight=0.008, stability_weight=0.12,
    ),
    "200b": Scale(
        d_model=12288, layers=96, heads=96, expert_hidden=32768, init_std_scale=0.8, gradient_clip=0.8,
        lora_rank=24, lora_alpha=0.15, lora_decay=0.992, step_budget=160, max_branches=4,
        memory_dim=1024, memory_top_k=8, memory_tokens=262_144,
        horizon=768, latency_weight=0.006, stability_weight=0.12,
    ),
}  # fmt: skip


def low_ranks(d_model: int) -> dict[str, int]:
    """Ranks of the low-rank maps of RWKV-7 at width `d_model`, as keys of `model.rwkv`.

    With d = d_model: 2 sqrt(d) for the decay and the in-context learning rate, 1.4 sqrt(d) for the value residual,
    0.12 d for the output gate. Each rank is rounded to a multiple of 32. The gate has at least 128. At d = 768, 1024,
    2048, 2560 and 4096 these are the ranks of the released RWKV-7 models. A rank is at least 1 and at most d / 4; the
    upper bound only has an effect below d = 512.
    """

    def rank(size: float, least: int) -> int:
        return max(1, min(max(least, 32 * round(size / 32)), d_model // 4))

    decay = rank(2 * math.sqrt(d_model), 32)
    value = rank(1.4 * math.sqrt(d_model), 32)
    return {"decay_rank": decay, "iclr_rank": decay, "value_rank": value, "gate_rank": rank(0.12 * d_model, 128)}


def core_param_autosizer(data: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of the core model from `model.size`, `model.d_model` and `model.attention.heads`.

    Args:
        data: the sections of a configuration.

    Returns:
        Sections with defaults. A key that `data` has takes precedence.
    """
    model = data.get("model")
    if not isinstance(model, Mapping) or model.get("kind", "cdrmix") != "cdrmix":
        return {}
    scale = _scale_of(model.get("size"))
    defaults: dict[str, Any] = {}
    if scale:
        defaults = {
            "model": {
                "d_model": scale.d_model,
                "layers": scale.layers,
                "init_std_scale": scale.init_std_scale,
                "attention": {"heads": scale.heads},
                "feed_forward": {"hidden": scale.expert_hidden},
            },
            "train": {"gradient_clip": scale.gradient_clip},
        }
    attention = model.get("attention", {})
    d_model = model.get("d_model", scale.d_model if scale else None)
    heads = attention.get("heads", scale.heads if scale else None) if isinstance(attention, Mapping) else None
    sections = defaults.setdefault("model", {})
    if _is_positive_int(d_model):
        sections["rwkv"] = low_ranks(d_model)
    if _is_positive_int(heads):
        sections["attention"] = {**sections.get("attention", {}), "kv_heads": heads}
    return defaults


def reasoning_param_autosizer(data: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of the `reasoning` section from `model.size`. Empty for a core run.

    Args:
        data: the sections of a configuration.

    Returns:
        Sections with defaults. A key that `data` has takes precedence.
    """
    model = data.get("model")
    scale = _scale_of(model.get("size")) if isinstance(model, Mapping) else None
    if scale is None or not isinstance(data.get("reasoning"), Mapping):
        return {}
    return {
        "reasoning": {
            "plastic_lora": {"rank": scale.lora_rank, "alpha": scale.lora_alpha, "decay": scale.lora_decay},
            "controller": {"step_budget": scale.step_budget, "max_branches": scale.max_branches},
            "memory": {"dim": scale.memory_dim, "top_k": scale.memory_top_k, "max_tokens": scale.memory_tokens},
            "rl": {
                "horizon": scale.horizon,
                "latency_weight": scale.latency_weight,
                "stability_weight": scale.stability_weight,
            },
        }
    }


def _scale_of(size: object) -> Scale | None:
    """The scale with this name, or None if `size` is not a known name. `size` may be any value."""
    return next((SCALES[name] for name in get_args(Size) if name == size), None)


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
