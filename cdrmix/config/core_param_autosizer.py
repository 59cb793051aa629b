"""From `model.size` and `model.d_model` to every width of the core model that was not written.

Input and output are plain nested data, not yet checked: what is missing or malformed is left to
the schema to report, so nothing here raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cdrmix.config.scales import scale_named

# Keys that follow from another: when the source is missing, only the source is worth reporting.
FOLLOWS = {"model.rwkv": "model.d_model", "model.attention.kv_heads": "model.attention.heads"}


def low_ranks(d_model: int) -> dict[str, int]:
    """Ranks of RWKV-7's low-rank maps at width `d_model`, as keys of `model.rwkv`.

    decay and in-context learning rate 2 sqrt(d), value residual 1.4 sqrt(d), output gate 0.12 d,
    each rounded to a multiple of 32, the gate at least 128. At 768, 1024, 2048, 2560 and 4096 this
    gives the ranks of the released RWKV-7 models exactly. No rank exceeds a quarter of the width
    (nor falls below 1), which only matters below d = 512: beyond it a map is hardly low-rank.
    """

    def rank(size: float, least: int) -> int:
        return max(1, min(max(least, 32 * round(size / 32)), d_model // 4))

    decay = rank(2 * math.sqrt(d_model), 32)
    value = rank(1.4 * math.sqrt(d_model), 32)
    return {"decay_rank": decay, "iclr_rank": decay, "value_rank": value, "gate_rank": rank(0.12 * d_model, 128)}


def core_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """What `data` (a configuration's sections) leaves open and its size, width and heads determine.

    Returns:
        Sections to be put under the written ones: a key that is written wins over its default here.
    """
    model = data.get("model")
    if not isinstance(model, Mapping):
        return {}
    scale = scale_named(model.get("size"))
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
    if _is_count(d_model):
        sections["rwkv"] = low_ranks(d_model)
    if _is_count(heads):
        sections["attention"] = {**sections.get("attention", {}), "kv_heads": heads}
    return defaults


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
