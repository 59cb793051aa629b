"""The router's logits in Triton: x W^T in float32 for x of any dtype, with few columns, and its gradients.

x [T, D], W float32 [E, D] -> logits float32 [T, E]. The forward pass reads x once; the backward pass reads it once
and writes dx in its dtype. PyTorch's products need a float32 copy of a bfloat16 x, which is also kept, and multiply
without tensor cores: with the casts 4.6 ms of a micro-batch of core-1b-12 on an H200 (16,384 tokens, 12 layers),
where the bytes of these kernels take 0.6 ms. There are no atomics: dW is summed from one row of sums for TOKENS
tokens, in order, and no token's result depends on its place.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdrmix.kernels.common.triton_helpers import Build, architecture, dot, dot_add
from cdrmix.kernels.moe.triton import precision_of
from cdrmix.kernels.moe.triton_rows import NAMES, REFERENCE_SHAPE, on

MOST_EXPERTS = 64  # the sums of dW of a program fit its registers
ELEMENTS = 2048  # of a tile of W, experts by channels: at most that, and no register spills
TILE = 32  # tokens
TOKENS = 512  # of a program of the backward pass
WARPS = 4


@triton.jit(do_not_specialize=["length"])
def moe_logits(
    x, weight, logits, length,
    E: tl.constexpr, D: tl.constexpr, PADDED_E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """logits [T, E] of BLOCK_T tokens."""
    tokens = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    experts = tl.arange(0, PADDED_E)
    total = tl.zeros([BLOCK_T, PADDED_E], tl.float32)
    for first in range(0, D, BLOCK_D):
        columns = first + tl.arange(0, BLOCK_D)
        inside = columns < D
        x_tile = tl.load(
            x + tokens[:, None] * D + columns[None, :], mask=(tokens < length)[:, None] & inside[None, :], other=0.0
        )
        w_tile = tl.load(
            weight + experts[None, :] * D + columns[:, None], mask=(experts < E)[None, :] & inside[:, None], other=0.0
        )
        total = dot_add(x_tile.to(tl.float32), w_tile, total, PRECISION)
    inside = (tokens < length)[:, None] & (experts < E)[None, :]
    tl.store(logits + tokens[:, None] * E + experts[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["length"])
def moe_logits_gradient(
    dlogits, x, weight, dx, partial, length,
    E: tl.constexpr, D: tl.constexpr, PADDED_E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    STEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx of STEPS tiles of tokens and BLOCK_D channels, and their sums for dW: a row of partial [programs, E, D]."""
    across = tl.cdiv(D, BLOCK_D)
    program = tl.program_id(0) // across
    columns = tl.program_id(0) % across * BLOCK_D + tl.arange(0, BLOCK_D)
    experts = tl.arange(0, PADDED_E)
    own = (experts < E)[:, None] & (columns < D)[None, :]
    w_tile = tl.load(weight + experts[:, None] * D + columns[None, :], mask=own, other=0.0)
    sums = tl.zeros([PADDED_E, BLOCK_D], tl.float32)
    for step in range(STEPS):
        tokens = ((program * STEPS + step) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        here = tokens[:, None] * D + columns[None, :]
        inside = (tokens < length)[:, None] & (columns < D)[None, :]
        given = tl.load(
            dlogits + tokens[:, None] * E + experts[None, :],
            mask=(tokens < length)[:, None] & (experts < E)[None, :],
            other=0.0,
        )
        x_tile = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
        sums = dot_add(tl.trans(given), x_tile, sums, PRECISION)
        tl.store(dx + here, dot(given, w_tile, PRECISION).to(dx.dtype.element_ty), mask=inside)
    row = partial + program.to(tl.int64) * E * D
    tl.store(row + experts[:, None] * D + columns[None, :], sums, mask=own)


def _constants(experts: int, width: int, arch: str) -> dict[str, Any]:
    padded = max(16, triton.next_power_of_2(experts))  # tl.dot takes at least 16
    channels = min(ELEMENTS // padded, 64)
    sizes = {"E": experts, "D": width, "PADDED_E": padded, "BLOCK_T": TILE, "BLOCK_D": channels}
    return sizes | {"PRECISION": precision_of(arch, torch.float32)}


def logits_forward(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """logits [T, E] float32; E at most MOST_EXPERTS, T at least 1."""
    (tokens, width), experts = x_TD.shape, len(weight_ED)
    logits_TE = torch.empty((tokens, experts), dtype=torch.float32, device=x_TD.device)
    constants = _constants(experts, width, architecture(x_TD.device))
    with on(x_TD.device):
        moe_logits[(triton.cdiv(tokens, TILE),)](
            x_TD, weight_ED, logits_TE, tokens, **constants, num_warps=WARPS, num_stages=3
        )
    return logits_TE


def logits_backward(dlogits_TE: Tensor, x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    """dx_TD in the dtype of x, and dW [E, D] float32."""
    (tokens, width), experts = x_TD.shape, len(weight_ED)
    programs = triton.cdiv(tokens, TOKENS)
    constants = _constants(experts, width, architecture(x_TD.device)) | {"STEPS": TOKENS // TILE}
    dx_TD = torch.empty_like(x_TD)
    partial = torch.empty((programs, experts, width), dtype=torch.float32, device=x_TD.device)
    with on(x_TD.device):
        moe_logits_gradient[(programs * triton.cdiv(width, constants["BLOCK_D"]),)](
            *(dlogits_TE, x_TD, weight_ED, dx_TD, partial, tokens), **constants, num_warps=WARPS, num_stages=1
        )
    return dx_TD, partial.sum(0)


def builds(arch: str) -> list[Build]:
    """Both kernels for 8 and MOST_EXPERTS experts in every dtype."""
    tokens, width, *_ = REFERENCE_SHAPE
    found = []
    for dtype, name in NAMES.items():
        for experts in (8, MOST_EXPERTS):
            forward = _constants(experts, width, arch)
            backward = forward | {"STEPS": TOKENS // TILE}
            types = dict.fromkeys(("x", "dx"), f"*{name}") | {"length": "i32"}
            types |= dict.fromkeys(("weight", "logits", "dlogits", "partial"), "*fp32")
            across, rows = triton.cdiv(width, backward["BLOCK_D"]), triton.cdiv(tokens, TOKENS)
            for kernel, constants, programs, times, moved, trips, stages in (
                (moe_logits, forward, tokens // TILE, 1, 1, triton.cdiv(width, forward["BLOCK_D"]), 3),
                (moe_logits_gradient, backward, rows * across, 2, 2, backward["STEPS"], 1),
            ):
                sums = rows * experts * width * 4 if kernel is moe_logits_gradient else 0
                found.append(
                    Build(
                        name=kernel.fn.__name__,
                        kernel=kernel,
                        signature={key: types[key] for key in kernel.arg_names if key in types},
                        constants=constants,
                        num_warps=WARPS,
                        num_stages=stages,
                        programs=programs,
                        flops=2 * times * tokens * width * experts,
                        bytes=moved * tokens * width * dtype.itemsize + tokens * experts * 4 + sums,
                        trips=(trips,),
                    )
                )
    return found
