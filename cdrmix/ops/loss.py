"""The loss op: a linear map and its cross-entropy in one."""

from __future__ import annotations

import torch
from torch import Tensor

from cdrmix.kernels import reference_loss
from cdrmix.ops.backend import compute_dtype


def linear_cross_entropy(hidden_RD: Tensor, weight_VD: Tensor, targets_R: Tensor, weights_R: Tensor) -> Tensor:
    """Weighted sum of the cross-entropies of `hidden @ weight.T`, in nats; see `reference_loss`."""
    dtype = compute_dtype(hidden_RD)
    with torch.autocast(hidden_RD.device.type, enabled=False):
        return reference_loss.linear_cross_entropy(hidden_RD.to(dtype), weight_VD.to(dtype), targets_R, weights_R)
