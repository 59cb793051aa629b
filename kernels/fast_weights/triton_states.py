"""The fast weights that the chunks of a row read, one after another, in Triton.

    P_n = pending_n M_n + U_n,  A_{n+1} = commit(P_n),  pending_{n+1} = decay A_{n+1},  n = 0 .. N - 1

In a chunk in which a document begins, pending_n is dropped: 0 is read in its place.
M_n [d, d] and U_n [r, d] are the map of chunk n, and commit scales rows down to a norm of at most `limit`
(ops/fast_weights.py). A program has one row of the batch, and keeps A in registers: forward it goes from the first
chunk to the last, backward from the last to the first. One launch takes the place of a dozen for every chunk. Sums are
in float32, norms in float64 as in `plastic_commit`. There are no atomics: the same bits every time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdrmix.kernels.common.triton_helpers import Build, architecture, dot, dot_add
from cdrmix.kernels.moe.triton_rows import on

WIDEST = 64  # of keys: a program keeps M_n [d, d], A and P [r, d] in registers
BLOCK_R = 16  # rows of A in a program; more are several programs, since rows do not depend on one another
WARPS = 4
RANKS = (8, 12, 16, 24)  # those of the released configurations, which are compiled ahead of time


@triton.jit
def commit_scale(rows, LIMIT: tl.constexpr, SHRINK: tl.constexpr):
    """The squared norms of the rows and the factors of commit, in float64."""
    wide = rows.to(tl.float64)
    squared = tl.sum(wide * wide, 1)
    norm = tl.sqrt(squared)
    return squared, tl.where(norm > LIMIT, SHRINK * LIMIT / tl.maximum(norm, LIMIT), 1.0)


@triton.jit
def place(number, row, RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offsets of rows [BLOCK_R, BLOCK_D] of the matrix `number`, of those from `row` on, and which of them exist."""
    rows = row + tl.arange(0, BLOCK_R)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    return number.to(tl.int64) * RANK * WIDTH + rows * WIDTH + columns, (rows < RANK) & (columns < WIDTH)


@triton.jit
def plastic_states_forward(
    keep, add, a, pending, drops, before, last, chunks,
    DECAY: tl.constexpr, LIMIT: tl.constexpr, SHRINK: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """before [B, N, RANK, WIDTH]: what each chunk reads; last [B, RANK, WIDTH]: A after the last one."""
    batch, row = tl.program_id(0), tl.program_id(1) * BLOCK_R
    at, inside = place(batch, row, RANK, WIDTH, BLOCK_R, BLOCK_D)
    state = tl.load(a + at, inside, 0.0)
    waiting = tl.load(pending + at, inside, 0.0)
    for n in range(chunks):
        number = batch * chunks + n
        here, _ = place(number, row, RANK, WIDTH, BLOCK_R, BLOCK_D)
        square, whole = place(number, 0, WIDTH, WIDTH, BLOCK_D, BLOCK_D)
        tl.store(before + here, state, inside)
        waiting = tl.where(tl.load(drops + number) != 0, 0.0, waiting)
        factor = tl.load(keep + square, whole, 0.0)
        written = dot_add(waiting, factor, tl.load(add + here, inside, 0.0), PRECISION)
        _, scale = commit_scale(written, LIMIT, SHRINK)
        state = written * scale.to(tl.float32)[:, None]
        waiting = state * DECAY
    tl.store(last + at, state, inside)


@triton.jit
def plastic_states_backward(
    keep, add, pending, drops, before, dbefore, dlast, dkeep, dadd, da, dpending, chunks,
    DECAY: tl.constexpr, LIMIT: tl.constexpr, SHRINK: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of keep [B, P, N, WIDTH, WIDTH], of each of the P programs of a row, add, a and pending."""
    batch, program = tl.program_id(0), tl.program_id(1)
    row = program * BLOCK_R
    at, inside = place(batch, row, RANK, WIDTH, BLOCK_R, BLOCK_D)
    dstate = tl.load(dlast + at, inside, 0.0)
    for back in range(chunks):
        n = chunks - 1 - back
        number = batch * chunks + n
        here, _ = place(number, row, RANK, WIDTH, BLOCK_R, BLOCK_D)
        square, whole = place(number, 0, WIDTH, WIDTH, BLOCK_D, BLOCK_D)
        factor = tl.load(keep + square, whole, 0.0)
        waiting = tl.load(before + here, inside, 0.0) * DECAY
        turned = tl.load(before + tl.trans(here), tl.trans(inside), 0.0) * DECAY  # loaded as its transpose: aot_ir.py
        if n == 0:
            waiting = tl.load(pending + at, inside, 0.0)
            turned = tl.load(pending + tl.trans(at), tl.trans(inside), 0.0)
        dropped = tl.load(drops + number) != 0
        waiting, turned = tl.where(dropped, 0.0, waiting), tl.where(dropped, 0.0, turned)
        written = dot_add(waiting, factor, tl.load(add + here, inside, 0.0), PRECISION)
        squared, scale = commit_scale(written, LIMIT, SHRINK)
        # commit(p) = SHRINK LIMIT p / |p|: its gradient is scale (d - p (p . d) / |p|^2); within the limit it is d.
        wide, dwide = written.to(tl.float64), dstate.to(tl.float64)
        along = tl.where(scale < 1.0, tl.sum(wide * dwide, 1) / tl.maximum(squared, 1e-300), 0.0)
        dwritten = ((dwide - wide * along[:, None]) * scale[:, None]).to(tl.float32)
        tl.store(dadd + here, dwritten, inside)
        own, _ = place((batch * tl.num_programs(1) + program) * chunks + n, 0, WIDTH, WIDTH, BLOCK_D, BLOCK_D)
        tl.store(dkeep + own, dot(turned, dwritten, PRECISION), whole)
        dwaiting = tl.where(dropped, 0.0, dot(dwritten, tl.trans(factor), PRECISION))
        dread = tl.load(dbefore + here, inside, 0.0)
        if n == 0:
            tl.store(dpending + at, dwaiting, inside)
            tl.store(da + at, dread, inside)
        dstate = dread + dwaiting * DECAY


def tiles(rank: int, width: int, arch: str) -> dict[str, Any]:
    """Sizes of the tiles: at least 16, which a product needs. NVIDIA's tensor cores make a product of three of TF32."""
    precision = "ieee" if arch == "gfx942" else "tf32x3"
    block_d = max(16, triton.next_power_of_2(width))
    return {"RANK": rank, "WIDTH": width, "BLOCK_R": BLOCK_R, "BLOCK_D": block_d, "PRECISION": precision}


def states_forward(
    keep: Tensor, add: Tensor, a: Tensor, pending: Tensor, drops: Tensor, decay: float, limit: float, shrink: float
) -> tuple[Tensor, Tensor]:
    """keep [B, N, d, d], add [B, N, r, d]; a, pending [B, r, d], all float32; drops: int8 [B, N], 1 where pending is
    dropped. What each chunk reads [B, N, r, d], and the last A [B, r, d]."""
    batch, chunks, rank, width = add.shape
    sizes = tiles(rank, width, architecture(add.device))
    before, last = torch.empty_like(add), torch.empty_like(a)
    with on(add.device):
        plastic_states_forward[(batch, triton.cdiv(rank, BLOCK_R))](
            *(keep, add, a, pending, drops, before, last, chunks),
            **{"DECAY": decay, "LIMIT": limit, "SHRINK": shrink, **sizes},
            num_warps=WARPS,
        )
    return before, last


def states_backward(
    dbefore: Tensor,
    dlast: Tensor,
    keep: Tensor,
    add: Tensor,
    pending: Tensor,
    drops: Tensor,
    before: Tensor,
    decay: float,
    limit: float,
    shrink: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of keep, add, a and pending."""
    batch, chunks, rank, width = add.shape
    sizes = tiles(rank, width, architecture(add.device))
    programs = triton.cdiv(rank, BLOCK_R)
    dkeep = keep.new_empty(batch, programs, *keep.shape[1:])
    dadd, da, dpending = torch.empty_like(add), torch.empty_like(pending), torch.empty_like(pending)
    with on(add.device):
        plastic_states_backward[(batch, programs)](
            *(keep, add, pending, drops, before, dbefore, dlast, dkeep, dadd, da, dpending, chunks),
            **{"DECAY": decay, "LIMIT": limit, "SHRINK": shrink, **sizes},
            num_warps=WARPS,
        )
    return dkeep.squeeze(1) if programs == 1 else dkeep.sum(1), dadd, da, dpending


def builds(arch: str) -> list[Build]:
    """Both kernels with keys of 64 and the released ranks, for 8 rows of 8 chunks."""
    return [build(name, rank, arch) for rank in RANKS for name in ("forward", "backward")]


def build(name: str, rank: int, arch: str) -> Build:
    """A kernel as it ships, with its cost."""
    batch, chunks, width = 8, 8, WIDEST
    forward = name == "forward"
    arrays = (
        "keep add a pending before last" if forward else "keep add pending before dbefore dlast dkeep dadd da dpending"
    )
    squares, states = (1, 2) if forward else (2, 4)  # of a chunk: matrices [d, d] and [r, d] that are moved
    return Build(
        name=f"plastic_states_{name}",
        kernel=plastic_states_forward if forward else plastic_states_backward,
        signature=dict.fromkeys(arrays.split(), "*fp32") | {"drops": "*i8", "chunks": "i32"},
        constants={"DECAY": 1.0, "LIMIT": 8.0, "SHRINK": 1 - 2**-22, **tiles(rank, width, arch)},
        num_warps=WARPS,
        num_stages=3,
        programs=batch * triton.cdiv(rank, BLOCK_R),
        flops=2 * batch * chunks * rank * width**2 * (1 if forward else 3),
        bytes=4 * batch * chunks * (squares * width**2 + states * rank * width),
        trips=(chunks,),
    )
