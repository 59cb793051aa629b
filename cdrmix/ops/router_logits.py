"""The router's logits as a PyTorch operator: float32 products of an input of any dtype with few columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cdrmix.kernels.common.products import product_of_rows
from cdrmix.ops.backend import backend, kernels_of
from cdrmix.ops.operator import operator

MAX_EXPERTS = 64  # the kernel's MOST_EXPERTS: torch.compile traces no import of its module


def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """x W^T in float32, or in float64 if x is float64: [T, E], whatever autocast says.

    x_TD: [T, D], bfloat16, float16, float32 or float64; weight_ED: float32 [E, D]. Differentiable in both; the gradient
    of x has its dtype. On a GPU up to 64 experts have a kernel, which reads x as it is and keeps nothing else;
    on NVIDIA GPUs it multiplies float32 by three TF32 products, with errors of 2^-21.
    Otherwise x is cast for PyTorch's product, and in generation the bits of a row do not depend on the number of rows.
    Raises ValueError for shapes that do not fit together.
    """
    if x_TD.ndim != 2 or weight_ED.ndim != 2 or x_TD.shape[1] != weight_ED.shape[1]:
        raise ValueError(
            f"router_logits: x must be [T, D] and the weight [E, D]; found {list(x_TD.shape)} and "
            f"{list(weight_ED.shape)}"
        )
    if _has_kernel(x_TD, weight_ED):
        logits_TE: Tensor = _router_logits(x_TD.contiguous(), weight_ED.contiguous())
        return logits_TE
    with torch.autocast(x_TD.device.type, enabled=False):
        x_TD = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
        return product_of_rows(x_TD, weight_ED.mT.to(x_TD.dtype))


def _has_kernel(x_TD: Tensor, weight_ED: Tensor) -> bool:
    served = weight_ED.dtype == torch.float32 and len(weight_ED) <= MAX_EXPERTS and x_TD.numel() > 0
    return served and backend(x_TD) == "triton"


@operator("cdrmix::router_logits")
def _router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    logits_TE: Tensor = kernels_of("moe", "triton_logits").logits_forward(x_TD, weight_ED)
    return logits_TE


@_router_logits.register_fake
def _(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    return x_TD.new_empty(len(x_TD), len(weight_ED), dtype=torch.float32)


@operator("cdrmix::router_logits_backward")
def _router_logits_backward(dlogits_TE: Tensor, x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = kernels_of("moe", "triton_logits").logits_backward(dlogits_TE, x_TD, weight_ED)
    return gradients


@_router_logits_backward.register_fake
def _(dlogits_TE: Tensor, x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_TD), torch.empty_like(weight_ED)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, dlogits_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
    dx_TD, dweight_ED = _router_logits_backward(dlogits_TE.contiguous(), *ctx.saved_tensors)
    wants_x, wants_weight = ctx.needs_input_grad
    return dx_TD if wants_x else None, dweight_ED if wants_weight else None


_router_logits.register_autograd(_differentiate, setup_context=_keep)
