"""What the load of the experts tells about the health of the routers."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def routing_metrics(
    tokens_per_expert_LE: Tensor, capacity_factor: float, counts_LE: Tensor | None = None
) -> dict[str, list[float]]:
    """Router health by layer, from the routes that wanted each expert of one global batch, [layers, E].

    counts_LE: the rows that each expert computed, fewer where a capacity dropped some; None: nothing was dropped.
    entropy_bits: of the load's distribution; at most log2 E. entropy_normalised: the same over log2 E.
    overflow: the share of routes above a capacity of capacity_factor times the mean over the global batch: what a
    capacity would drop, whether there is one or not. dropped: the share that was dropped; 0 without a capacity, else
    near the overflow, as each micro-batch of each process has a capacity of its own. max_over_mean: the most wanted
    expert's load. dead_experts: those that no route wanted.
    """
    tokens_LE = tokens_per_expert_LE.double()
    experts = tokens_LE.shape[-1]
    total = tokens_LE.sum(-1, keepdim=True).clamp(min=1)
    share = tokens_LE / total
    entropy = -torch.special.xlogy(share, share).sum(-1) / math.log(2)
    capacity = (capacity_factor * total / experts).ceil()
    dropped = tokens_LE - (tokens_LE if counts_LE is None else counts_LE.double())
    return {
        "entropy_bits": entropy.tolist(),
        "entropy_normalised": (entropy / max(math.log2(experts), 1e-12)).tolist(),
        "overflow": ((tokens_LE - capacity).clamp(min=0).sum(-1) / total.squeeze(-1)).tolist(),
        "dropped": (dropped.sum(-1) / total.squeeze(-1)).tolist(),
        "max_over_mean": (share.amax(-1) * experts).tolist(),
        "dead_experts": (tokens_LE == 0).double().sum(-1).tolist(),
    }


def expert_load(tokens_per_expert_LE: Tensor) -> list[list[float]]:
    """Each expert's share of its layer's routes, layer by layer; 1 / E where the load is even."""
    tokens_LE = tokens_per_expert_LE.double()
    return (tokens_LE / tokens_LE.sum(-1, keepdim=True).clamp(min=1)).tolist()
