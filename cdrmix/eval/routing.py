"""What the load of the experts tells about the health of the routers."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def routing_metrics(counts_LE: Tensor, capacity_factor: float) -> dict[str, list[float]]:
    """Router health by layer, from the routed rows of each expert, [layers, E].

    entropy_bits: of the load's distribution; at most log2 E. entropy_normalised: the same over log2 E.
    overflow: the share of rows above a capacity of capacity_factor times the mean, which a capacity-bound layer
    would drop (ours drops none). max_over_mean: the busiest expert's load. dead_experts: those with no row.
    """
    counts = counts_LE.double()
    experts = counts.shape[-1]
    total = counts.sum(-1, keepdim=True).clamp(min=1)
    share = counts / total
    entropy = -torch.special.xlogy(share, share).sum(-1) / math.log(2)
    capacity = (capacity_factor * total / experts).ceil()
    return {
        "entropy_bits": entropy.tolist(),
        "entropy_normalised": (entropy / max(math.log2(experts), 1e-12)).tolist(),
        "overflow": ((counts - capacity).clamp(min=0).sum(-1) / total.squeeze(-1)).tolist(),
        "max_over_mean": (share.amax(-1) * experts).tolist(),
        "dead_experts": (counts == 0).double().sum(-1).tolist(),
    }
