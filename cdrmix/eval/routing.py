"""Metrics of the load of the experts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CAPACITY = 1.25  # multiple of an even share, above which tokens of a model of transformers count as overflow


def routing_metrics(
    tokens_per_expert_LE: Tensor, capacity_factor: float, counts_LE: Tensor | None = None
) -> dict[str, list[float]]:
    """Load metrics of each layer for one global batch.

    tokens_per_expert_LE: number of routes to each expert before a capacity is applied, [layers, E].
    counts_LE: number of rows that each expert computed after the capacity; None if nothing was dropped.

    Returns lists with one value for each layer:
        entropy_bits: entropy of the load, at most log2 E. entropy_normalised: entropy_bits / log2 E.
        overflow: share of the routes above a capacity of capacity_factor times the mean load of the global batch. A
            capacity would drop about this share.
        dropped: share of the routes that were dropped; 0 without a capacity. It differs from the overflow, because
            each micro-batch of each process has its own capacity.
        max_over_mean: largest load over the mean load. dead_experts: number of experts without routes.
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
