"""The autosizers: `model.size` sets the keys of a configuration that the file does not write.

Input and output are nested data that nobody has validated yet. The autosizers skip what is missing or malformed, and
the schema reports it. So nothing here raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from cdrmix.config.nodes import fill

Size = Literal[
    "1b", "4b", "40b", "200b",
    "dense-50m", "dense-125m", "dense-500m", "dense-1b", "dense-3b", "dense-7b", "dense-13b",
    "hybrid-50m", "hybrid-125m", "hybrid-500m", "hybrid-1b", "hybrid-3b", "hybrid-7b", "hybrid-13b",
]  # fmt: skip

# Keys that are derived from another key. If that key is missing, only that key is reported.
DERIVED_FROM = {"model.rwkv": "model.d_model", "model.attention.kv_heads": "model.attention.heads"}


@dataclass(frozen=True)
class ReasoningScale:
    """The values that one size sets for the reasoning model on top of the core model. Horizons in controller steps."""

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


@dataclass(frozen=True)
class Scale:
    """The values that one model size sets. Widths in elements.

    hidden: of one expert, or of the dense feed-forward. kv_heads: None: as many as heads. attention_fraction: of the
    layers, in a model with a dense feed-forward; None: a mixture of experts, for which the size sets neither the
    feed-forward's kind nor the norms. reasoning: None: the size sets no keys of a reasoning model.
    """

    d_model: int
    layers: int
    heads: int
    hidden: int
    kv_heads: int | None = None
    attention_fraction: float | None = None
    init_std_scale: float = 1.0
    gradient_clip: float = 1.0
    reasoning: ReasoningScale | None = None


SCALES: dict[Size, Scale] = {
    "1b": Scale(
        d_model=2048, layers=24, heads=16, hidden=4608,
        reasoning=ReasoningScale(
            lora_rank=8, lora_alpha=0.20, lora_decay=0.98, step_budget=64, max_branches=3,
            memory_dim=512, memory_top_k=4, memory_tokens=16_384,
            horizon=256, latency_weight=0.01, stability_weight=0.10,
        ),
    ),
    "4b": Scale(
        d_model=3072, layers=36, heads=24, hidden=8192,
        reasoning=ReasoningScale(
            lora_rank=12, lora_alpha=0.18, lora_decay=0.985, step_budget=96, max_branches=3,
            memory_dim=640, memory_top_k=6, memory_tokens=32_768,
            horizon=384, latency_weight=0.01, stability_weight=0.10,
        ),
    ),
    "40b": Scale(
        d_model=6144, layers=64, heads=48, hidden=16384, init_std_scale=0.9, gradient_clip=0.9,
        reasoning=ReasoningScale(
            lora_rank=16, lora_alpha=0.16, lora_decay=0.99, step_budget=128, max_branches=4,
            memory_dim=768, memory_top_k=8, memory_tokens=131_072,
            horizon=512, latency_weight=0.008, stability_weight=0.12,
        ),
    ),
    "200b": Scale(
        d_model=12288, layers=96, heads=96, hidden=32768, init_std_scale=0.8, gradient_clip=0.8,
        reasoning=ReasoningScale(
            lora_rank=24, lora_alpha=0.15, lora_decay=0.992, step_budget=160, max_branches=4,
            memory_dim=1024, memory_top_k=8, memory_tokens=262_144,
            horizon=768, latency_weight=0.006, stability_weight=0.12,
        ),
    ),
    # The dense ladder. hidden: the multiple of 64 with which the parameters, with a tied vocabulary of 50,272, are
    # nearest to the number in the name; tests/config/test_ladder_sizes.py solves for it again.
    "dense-50m": Scale(512, 8, 8, 1536, kv_heads=2, attention_fraction=1.0),
    "dense-125m": Scale(768, 12, 12, 2432, kv_heads=4, attention_fraction=1.0),
    "dense-500m": Scale(1024, 24, 16, 5248, kv_heads=4, attention_fraction=1.0),
    "dense-1b": Scale(1536, 28, 12, 5760, kv_heads=4, attention_fraction=1.0),
    "dense-3b": Scale(2560, 32, 20, 9664, kv_heads=4, attention_fraction=1.0),
    "dense-7b": Scale(4096, 32, 32, 13888, kv_heads=8, attention_fraction=1.0),
    "dense-13b": Scale(5120, 40, 40, 16640, kv_heads=8, attention_fraction=1.0),
    # The same with three RWKV-7 layers for every attention layer. These have more parameters, so hidden is less.
    "hybrid-50m": Scale(512, 8, 8, 1216, kv_heads=2, attention_fraction=0.25),
    "hybrid-125m": Scale(768, 12, 12, 2048, kv_heads=4, attention_fraction=0.25),
    "hybrid-500m": Scale(1024, 24, 16, 4672, kv_heads=4, attention_fraction=0.25),
    "hybrid-1b": Scale(1536, 28, 12, 5056, kv_heads=4, attention_fraction=0.25),
    "hybrid-3b": Scale(2560, 32, 20, 8320, kv_heads=4, attention_fraction=0.25),
    "hybrid-7b": Scale(4096, 32, 32, 11904, kv_heads=8, attention_fraction=0.25),
    "hybrid-13b": Scale(5120, 40, 40, 14144, kv_heads=8, attention_fraction=0.25),
}  # fmt: skip
REASONING_SIZES = tuple(size for size, scale in SCALES.items() if scale.reasoning is not None)


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
                "feed_forward": {"hidden": scale.hidden},
            },
            "train": {"gradient_clip": scale.gradient_clip},
        }
        if scale.attention_fraction is not None:
            defaults["model"] |= {
                "attention_fraction": scale.attention_fraction,
                "norm": "rmsnorm",
                "norm_eps": 1e-6,
                "embedding_norm": scale.attention_fraction < 1,  # ln0 of RWKV; Llama has none
                "feed_forward": {"kind": "dense", "hidden": scale.hidden},
            }
    attention = model.get("attention", {})
    d_model = model.get("d_model", scale.d_model if scale else None)
    heads, kv_heads = (scale.heads, scale.kv_heads) if scale else (None, None)
    if not isinstance(attention, Mapping):
        heads = None
    elif "heads" in attention:
        heads, kv_heads = attention["heads"], None
    sections = defaults.setdefault("model", {})
    feed_forward = fill(model, sections).get("feed_forward")
    if isinstance(feed_forward, Mapping) and feed_forward.get("kind") == "dense":
        sections["feed_forward"] = {**sections.get("feed_forward", {}), "activation": "swiglu"}
    if _is_positive_int(d_model):
        sections["rwkv"] = low_ranks(d_model)
    if _is_positive_int(heads):
        sections["attention"] = {**sections.get("attention", {}), "kv_heads": kv_heads or heads}
    return defaults


def reasoning_param_autosizer(data: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of the `reasoning` section from `model.size`. Empty for a core run.

    Args:
        data: the sections of a configuration.

    Returns:
        Sections with defaults. A key that `data` has takes precedence.
    """
    model = data.get("model")
    size = _scale_of(model.get("size")) if isinstance(model, Mapping) else None
    scale = size.reasoning if size else None
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
