"""From `model.size` to the parameters of a reasoning run that were not written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cdrmix.config.scales import scale_named


def reasoning_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """What `data` (a configuration's sections) leaves open and its size determines; nothing for a core run.

    Returns:
        Sections to be put under the written ones: a key that is written wins over its default here.
    """
    model = data.get("model")
    scale = scale_named(model.get("size")) if isinstance(model, Mapping) else None
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
