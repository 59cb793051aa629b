"""Rotary positions as a PyTorch operator: one kernel on a GPU, plain PyTorch elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cdrmix.ops.backend import backend, kernels_of
from cdrmix.ops.operator import operator


def apply_rotary(x_BTHN: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """x with each pair (i, i + N/2) rotated by its token's angle (arXiv 2104.09864), in the dtype of x.

    x: [B, T, H, N], N even; cosine and sine of the angles: [B or 1, T, 1, N/2]; any floating-point dtypes. The angles
    get no gradient, and that of x is the rotation back: nothing of the size of x is kept on a GPU.
    Raises ValueError for shapes that do not fit together.
    """
    batch, length, _, width = x_BTHN.shape
    shapes = [(rows, length, 1, width // 2) for rows in (1, batch)]
    if width % 2 or cosine.shape not in shapes or sine.shape != cosine.shape:
        raise ValueError(
            f"apply_rotary: x is {list(x_BTHN.shape)}, so cosine and sine must be "
            f"[1 or {batch}, {length}, 1, {width / 2:g}] with N even; found {list(cosine.shape)} and {list(sine.shape)}"
        )
    if backend(x_BTHN) == "triton" and x_BTHN.numel() > 0:
        y_BTHN: Tensor = _apply_rotary(x_BTHN.contiguous(), cosine.detach().contiguous(), sine.detach().contiguous(), 1)
        return y_BTHN
    cosine, sine = cosine.to(x_BTHN.dtype), sine.to(x_BTHN.dtype)
    left, right = x_BTHN.chunk(2, -1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], -1)


@operator("cdrmix::apply_rotary")
def _apply_rotary(x_BTHN: Tensor, cosine: Tensor, sine: Tensor, sign: int) -> Tensor:
    y_BTHN: Tensor = kernels_of("attention", "triton_rotary").rotate(x_BTHN, cosine, sine, sign)
    return y_BTHN


@_apply_rotary.register_fake
def _(x_BTHN: Tensor, cosine: Tensor, sine: Tensor, sign: int) -> Tensor:
    return torch.empty_like(x_BTHN)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
    _, cosine, sine, ctx.sign = inputs
    ctx.save_for_backward(cosine, sine)


def _differentiate(ctx: Any, dy_BTHN: Tensor) -> tuple[Tensor | None, ...]:
    cosine, sine = ctx.saved_tensors
    return _apply_rotary(dy_BTHN.contiguous(), cosine, sine, -ctx.sign), None, None, None


_apply_rotary.register_autograd(_differentiate, setup_context=_keep)
