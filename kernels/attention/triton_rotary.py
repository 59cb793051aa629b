"""Rotary positions in Triton: each pair (i, i + N/2) of a head's vector rotated by its token's angle, in one pass.

x [tokens, H, N] -> y of its dtype; cosine and sine [rows, N/2], of which token t has row t mod rows. Float32 in
registers. The gradient is the rotation by the negative angle, so nothing of the size of x is kept. PyTorch's four
products, two sums and a concatenation read and write x eleven times.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdrmix.kernels.common.triton_helpers import Build
from cdrmix.kernels.moe.triton_rows import NAMES, on

ELEMENTS = 1024  # of a tile: 8 pairs for each thread of 4 warps
WARPS = 4


@triton.jit(do_not_specialize=["vectors", "heads", "rows", "sign"])
def rotate_kernel(
    x, cosine, sine, y, vectors, heads, rows, sign,
    HALF: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y [vectors, 2 HALF] of x, vectors = tokens H; sign: 1, or -1 for the gradient."""
    vector = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED)
    inside = (vector < vectors)[:, None] & (column < HALF)[None, :]
    left = vector.to(tl.int64)[:, None] * (2 * HALF) + column[None, :]
    angle = (vector // heads % rows).to(tl.int64)[:, None] * HALF + column[None, :]
    c = tl.load(cosine + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sine + angle, mask=inside, other=0.0).to(tl.float32) * sign
    x_left = tl.load(x + left, mask=inside, other=0.0).to(tl.float32)
    x_right = tl.load(x + left + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + left, (x_left * c - x_right * s).to(y.dtype.element_ty), mask=inside)
    tl.store(y + left + HALF, (x_right * c + x_left * s).to(y.dtype.element_ty), mask=inside)


def _constants(half: int) -> dict[str, int]:
    padded = triton.next_power_of_2(half)
    return {"HALF": half, "PADDED": padded, "BLOCK": max(ELEMENTS // padded, 1)}


def rotate(x_BTHN: Tensor, cosine: Tensor, sine: Tensor, sign: int) -> Tensor:
    """x [B, T, H, N] rotated by sign times the angles; cosine and sine: [B or 1, T, 1, N/2], contiguous as x is."""
    heads, width = x_BTHN.shape[2:]
    constants = _constants(width // 2)
    vectors = x_BTHN.numel() // width
    assert vectors < 2**31
    y_BTHN = torch.empty_like(x_BTHN)
    with on(x_BTHN.device):
        rotate_kernel[(triton.cdiv(vectors, constants["BLOCK"]),)](
            *(x_BTHN, cosine, sine, y_BTHN, vectors, heads, cosine.shape[0] * cosine.shape[1], sign),
            **constants,
            num_warps=WARPS,
        )
    return y_BTHN


def builds(arch: str) -> list[Build]:
    """Heads of 64, 96 and 128 channels in every dtype, the same on every architecture."""
    tokens, width = 8 * 4096, 2048
    found = []
    for dtype, name in NAMES.items():
        for head in (64, 96, 128):
            constants, vectors = _constants(head // 2), tokens * width // head
            types = dict.fromkeys(("x", "y", "cosine", "sine"), f"*{name}")
            found.append(
                Build(
                    name="rotate",
                    kernel=rotate_kernel,
                    signature=types | dict.fromkeys(("vectors", "heads", "rows", "sign"), "i32"),
                    constants=constants,
                    num_warps=WARPS,
                    num_stages=3,
                    programs=triton.cdiv(vectors, constants["BLOCK"]),
                    flops=3 * vectors * head,
                    bytes=2 * vectors * head * dtype.itemsize + tokens * head * dtype.itemsize,
                )
            )
    return found
