"""Rows of the mixture of experts in Triton: sorted rows and row tiles, dispatch to experts, combination by token.

T tokens, K choices a token, R = T K routes; order_R holds the routes sorted by expert, kept ones first
(triton_route.py). Sorted row r is route order_R[r], which belongs to token order_R[r] // K.
    dispatch  x_R[r] = x[order_R[r] // K] for kept rows, zero for dropped ones
    combine   y[t] = sum_j w[t, j] y_R[inverse[t K + j]], or without w: a gather for each token, in float32 and in
              order of choice, so no sum depends on the order in which programs run
Offsets are int64. The host reads nothing back: there are as many tiles as the shapes can require.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdrmix.kernels.common.triton_helpers import Build, narrow

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
PLAN_BLOCK = 256  # routes, and tiles, of a program of moe_plan
MOST_ROUTES = 2**31 - 2**16  # rows are numbered in int32


@triton.jit(do_not_specialize=["routes", "tiles"])
def moe_plan(
    order, counts, tokens, inverse, table, routes, tiles,
    E: tl.constexpr, PADDED_E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Token of each sorted row [R], sorted row of each route [R] (-1: dropped), and the table of row tiles.

    The table is [tiles + 1, 3]. A tile is (expert, first row, end row): at most BLOCK_M rows of one expert. Tiles
    without rows follow those with rows. The last entry begins with the number of tiles that have rows.
    """
    program = tl.program_id(0)
    experts = tl.arange(0, PADDED_E)
    count = tl.load(counts + experts, mask=experts < E, other=0).to(tl.int32)
    kept = tl.sum(count)
    rows = program * BLOCK + tl.arange(0, BLOCK)
    route = tl.load(order + rows, mask=rows < routes, other=0).to(tl.int32)
    tl.store(tokens + rows, route // K, mask=rows < routes)
    tl.store(inverse + route, tl.where(rows < kept, rows, -1), mask=rows < routes)

    if program * BLOCK < tiles:
        # Tile i belongs to expert e if tile_end[e] - own[e] <= i < tile_end[e].
        end = tl.cumsum(count, 0)
        own = (count + BLOCK_M - 1) // BLOCK_M
        tile_end = tl.cumsum(own, 0)
        mine = (rows[:, None] >= (tile_end - own)[None, :]) & (rows[:, None] < tile_end[None, :])
        first = (end - count)[None, :] + (rows[:, None] - (tile_end - own)[None, :]) * BLOCK_M
        last = tl.minimum(first + BLOCK_M, end[None, :])
        tl.store(table + rows * 3, tl.sum(tl.where(mine, experts[None, :], 0), 1), mask=rows < tiles)
        tl.store(table + rows * 3 + 1, tl.sum(tl.where(mine, first, 0), 1), mask=rows < tiles)
        tl.store(table + rows * 3 + 2, tl.sum(tl.where(mine, last, 0), 1), mask=rows < tiles)
        if program == 0:
            tl.store(table + tiles * 3, tl.sum(own))


@triton.jit(do_not_specialize=["routes"])
def moe_dispatch(
    x, order, counts, out, routes,
    D: tl.constexpr, E: tl.constexpr, PADDED_E: tl.constexpr, K: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows of x [T, D] in sorted order: out [R, D]; zeros from the first dropped row on."""
    experts = tl.arange(0, PADDED_E)
    kept = tl.sum(tl.load(counts + experts, mask=experts < E, other=0))
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = tl.load(order + rows, mask=rows < routes, other=0) // K
    wide = columns[None, :] < D
    tile = tl.load(x + token[:, None] * D + columns[None, :], mask=(rows < kept)[:, None] & wide, other=0.0)
    tl.store(out + rows[:, None] * D + columns[None, :], tile, mask=(rows < routes)[:, None] & wide)


@triton.jit(do_not_specialize=["length"])
def moe_combine(
    rows, inverse, weights, out, length,
    D: tl.constexpr, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sum of a token's kept rows [R, D], weighted or not, in float32 and in order of choice: out [T, D]."""
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = tokens < length
    wide = columns[None, :] < D
    total = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for choice in range(K):
        row = tl.load(inverse + tokens * K + choice, mask=inside, other=-1)
        tile = tl.load(
            rows + row.to(tl.int64)[:, None] * D + columns[None, :], mask=(row >= 0)[:, None] & wide, other=0.0
        ).to(tl.float32)
        if WEIGHTED:
            tile *= tl.load(weights + tokens * K + choice, mask=inside, other=0.0)[:, None]
        total += tile
    out_tile = narrow(total, out.dtype.element_ty)
    tl.store(out + tokens[:, None] * D + columns[None, :], out_tile, mask=inside[:, None] & wide)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the kernels over sorted rows share.

    tokens_R, inverse_R: int32 [R], see moe_plan. table: int32 [tiles + 1, 3], see moe_plan.
    """

    tokens_R: Tensor
    inverse_R: Tensor
    table: Tensor

    @property
    def tiles(self) -> int:
        return self.table.shape[0] - 1


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which this device is the current one, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def processors(device: torch.device) -> int:
    """Programs of a persistent kernel: one a multiprocessor; 3 under the interpreter, so each has several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def tile_bound(routes: int, experts: int, block_m: int) -> int:
    """The largest possible number of row tiles, from shapes alone."""
    return -(-routes // block_m) + experts


def plan(order_R: Tensor, counts_E: Tensor, k: int, block_m: int) -> Plan:
    """The order of the sorted rows, and row tiles of block_m rows; computed on the device."""
    routes, experts = order_R.numel(), counts_E.numel()
    if routes > MOST_ROUTES:
        raise ValueError(f"the experts' kernels number routes in int32, and {routes} are too many: use a smaller batch")
    tiles = tile_bound(routes, experts, block_m)
    made = Plan(
        torch.empty((routes,), dtype=torch.int32, device=order_R.device),
        torch.empty((routes,), dtype=torch.int32, device=order_R.device),
        torch.empty((tiles + 1, 3), dtype=torch.int32, device=order_R.device),
    )
    with on(order_R.device):
        moe_plan[(-(-max(routes, tiles) // PLAN_BLOCK),)](
            *(order_R, counts_E, made.tokens_R, made.inverse_R, made.table, routes, tiles),
            **(_expert_constants(experts) | {"K": k, "BLOCK": PLAN_BLOCK, "BLOCK_M": block_m}),
            num_warps=4,
        )
    return made


def _expert_constants(experts: int) -> dict[str, Any]:
    return {"E": experts, "PADDED_E": triton.next_power_of_2(experts)}


def _block_columns(D: int, size: int) -> tuple[int, int]:
    """Rows and columns of a program that moves rows: 16 KiB in all, and at most 8 KiB of one row."""
    columns = min(triton.next_power_of_2(D), 8192 // size)
    return max(min(16384 // size // columns, 16), 1), columns


def dispatch(x_TD: Tensor, order_R: Tensor, counts_E: Tensor, k: int) -> Tensor:
    """Tokens' rows in sorted order: [T, D] -> [R, D], zeros from row counts_E.sum() on."""
    x_TD = x_TD.contiguous()
    D, routes = x_TD.shape[1], order_R.numel()
    out = torch.empty((routes, D), dtype=x_TD.dtype, device=x_TD.device)
    block_r, block_d = _block_columns(D, x_TD.element_size())
    if out.numel():
        with on(x_TD.device):
            moe_dispatch[(-(-routes // block_r), -(-D // block_d))](
                *(x_TD, order_R, counts_E, out, routes),
                **(_expert_constants(counts_E.numel()) | {"D": D, "K": k, "BLOCK_R": block_r, "BLOCK_D": block_d}),
                num_warps=4,
            )
    return out


def combine(y_RD: Tensor, order_R: Tensor, counts_E: Tensor, k: int) -> Tensor:
    """The sum of each token's kept rows, unweighted, in float32 and in order of choice: [R, D] -> [T, D]."""
    return combine_rows(y_RD.contiguous(), plan(order_R, counts_E, k, 128).inverse_R, None, k)


def combine_rows(y_RD: Tensor, inverse_R: Tensor, weights_TK: Tensor | None, k: int) -> Tensor:
    """The sum of each token's kept rows, weighted if there are weights [T, K] float32: [R, D] -> [T, D]."""
    tokens, D = inverse_R.numel() // k, y_RD.shape[1]
    out = torch.empty((tokens, D), dtype=y_RD.dtype, device=y_RD.device)
    block_t, block_d = _block_columns(D, y_RD.element_size())
    constants = {"D": D, "K": k, "WEIGHTED": weights_TK is not None, "BLOCK_T": block_t, "BLOCK_D": block_d}
    if out.numel():
        with on(y_RD.device):
            moe_combine[(-(-tokens // block_t), -(-D // block_d))](
                *(y_RD, inverse_R, y_RD if weights_TK is None else weights_TK, out, tokens),
                **constants,
                num_warps=4,
            )
    return out


# The shape of the Builds: tokens, model, hidden, experts, choices.
REFERENCE_SHAPE = (32768, 2048, 4608, 8, 2)


def builds(arch: str) -> list[Build]:
    """The kernels for every dtype at T 32768, D 2048, E 8, K 2, the same on every architecture."""
    return list(_builds())


def _builds() -> Iterator[Build]:
    T, D, _, E, K = REFERENCE_SHAPE
    R = T * K
    tiles = tile_bound(R, E, 128)
    yield Build(
        name="moe_plan",
        kernel=moe_plan,
        signature={"order": "*i64", "counts": "*i64", "tokens": "*i32", "inverse": "*i32", "table": "*i32"}
        | {"routes": "i32", "tiles": "i32"},
        constants=_expert_constants(E) | {"K": K, "BLOCK": PLAN_BLOCK, "BLOCK_M": 128},
        num_warps=4,
        num_stages=3,
        programs=-(-R // PLAN_BLOCK),
        flops=R,
        bytes=R * 16 + tiles * 12,
    )
    for dtype, name in NAMES.items():
        block, block_d = _block_columns(D, dtype.itemsize)
        columns = -(-D // block_d)
        yield Build(
            name="moe_dispatch",
            kernel=moe_dispatch,
            signature={"x": f"*{name}", "order": "*i64", "counts": "*i64", "out": f"*{name}", "routes": "i32"},
            constants=_expert_constants(E) | {"D": D, "K": K, "BLOCK_R": block, "BLOCK_D": block_d},
            num_warps=4,
            num_stages=3,
            programs=-(-R // block) * columns,
            flops=R,
            bytes=(T + R) * D * dtype.itemsize + 8 * R,
        )
        for weighted in (False, True):
            yield Build(
                name="moe_combine",
                kernel=moe_combine,
                signature={"rows": f"*{name}", "inverse": "*i32", "weights": "*fp32" if weighted else f"*{name}"}
                | {"out": f"*{name}", "length": "i32"},
                constants={"D": D, "K": K, "WEIGHTED": weighted, "BLOCK_T": block, "BLOCK_D": block_d},
                num_warps=4,
                num_stages=3,
                programs=-(-T // block) * columns,
                flops=2 * R * D,
                bytes=(T + R) * D * dtype.itemsize + 4 * R,
                trips=(K,),
            )
