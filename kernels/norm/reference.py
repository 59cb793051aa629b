"""The residual sum and its norm in plain PyTorch: specification and oracle.

Shapes: [..., D]. Autograd computes the gradients. All of it runs in float64 too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

KINDS = ("layernorm", "rmsnorm")


def add_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, *, eps: float, kind: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x + y in x's dtype, and its norm over the last dimension in `dtype`; without y, x itself and its norm.

    layernorm, arXiv 1607.06450: (t - mean) / sqrt(variance + eps) weight + bias. rmsnorm, arXiv 1910.07467:
    t / sqrt(mean of squares + eps) weight. t is the sum after rounding to x's dtype, computed with in float32 at least.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x if y is None else (x.to(wide) + y.to(wide)).to(x.dtype)
    scale = weight.to(wide)
    if kind == "layernorm":
        shift = None if bias is None else bias.to(wide)
        normed = functional.layer_norm(total.to(wide), total.shape[-1:], scale, shift, eps)
    else:
        normed = functional.rms_norm(total.to(wide), total.shape[-1:], scale, eps)
    return total, normed.to(dtype)
