"""A projection with a low-rank product in its epilogue, in Triton: y_s = x W^T + z_s B^T.

x [R, I], W [O, I], B [O, r], z [S, R, r] -> y [S, R, O], all of one dtype. The branches s share one product x W^T. Sums
are in float32. The accumulator of x W^T is extended by z_s B^T before it is rounded and stored, so y is written once
and never read. With z = 0, y is exactly x W^T. Two cuBLAS calls would write y, read it and write it again: at R 32,768
and I = O = 2,048 in bfloat16 0.27 GB more, 62 us at an H200's 4.3 TB/s, where the product takes 0.4 ms.

With one branch the accumulator is extended in place. With several it is kept for the next branch, so the tiles are
smaller. The gradients are plain products (reference.py). There are no atomics and no tuning at run time: the same bits
every time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdrmix.kernels.common.triton_helpers import Build, architecture
from cdrmix.kernels.moe.triton import Launch, tile_constants
from cdrmix.kernels.moe.triton_gemm import add_gathered_product, gathered_product, store_rows, tile_of
from cdrmix.kernels.moe.triton_rows import NAMES, on

RANKS = (12, 16, 24, 32, 64, 128)  # the ranks that are compiled ahead of time; 12 and 24 are padded


@triton.jit(do_not_specialize=["rows", "branches"])
def plastic_project(
    x, w, b_up, reads, y, rows, branches,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, BRANCHED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y [S, R, OUTPUTS] = x [R, INPUTS] w^T + reads [S, R, RANK] b_up^T, with S = 1 unless BRANCHED."""
    tile, column = tile_of(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(OUTPUTS, BLOCK_N), GROUP)
    column = column * BLOCK_N
    columns = column + tl.arange(0, BLOCK_N)
    own = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = own < rows
    own = tl.minimum(own, rows - 1).to(tl.int64)
    base = gathered_product(x, own, w, column, INPUTS, OUTPUTS, 1, INPUTS, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    if BRANCHED:
        row = own
        for _ in range(branches):
            total = add_gathered_product(
                base, reads, row, b_up, column,
                RANK, OUTPUTS, 1, RANK, BLOCK_M, BLOCK_N, BLOCK_RANK, PRECISION,
            )  # fmt: skip
            store_rows(y, row, inside, columns, total, OUTPUTS, OUTPUTS % BLOCK_N == 0)
            row += rows
    else:
        total = add_gathered_product(
            base, reads, own, b_up, column,
            RANK, OUTPUTS, 1, RANK, BLOCK_M, BLOCK_N, BLOCK_RANK, PRECISION,
        )  # fmt: skip
        store_rows(y, own, inside, columns, total, OUTPUTS, OUTPUTS % BLOCK_N == 0)


# By architecture and operand width in bytes: the launch for one branch, and for several. These are the widest tiles
# that spill no register.
LAUNCHES: dict[tuple[str, int], tuple[Launch, Launch]] = {
    ("sm_80", 2): (Launch(128, 128, 64, 8, 4), Launch(128, 64, 64, 4, 3)),
    ("sm_90", 2): (Launch(128, 256, 64, 8, 4), Launch(128, 64, 64, 4, 4)),
    ("sm_100", 2): (Launch(128, 256, 64, 8, 4), Launch(128, 64, 64, 4, 4)),
    ("gfx942", 2): (Launch(128, 128, 64, 8, 2), Launch(128, 128, 64, 8, 2)),
    ("sm_80", 4): (Launch(128, 64, 32, 8, 3), Launch(64, 64, 32, 8, 3)),
    ("sm_90", 4): (Launch(128, 128, 32, 8, 3), Launch(128, 64, 32, 8, 3)),
    ("sm_100", 4): (Launch(128, 128, 32, 8, 3), Launch(128, 64, 32, 8, 3)),
    ("gfx942", 4): (Launch(64, 64, 32, 4, 2), Launch(64, 64, 32, 4, 2)),
}


def launch_of(arch: str, dtype: torch.dtype, branched: bool) -> Launch:
    """The shipped launch."""
    return LAUNCHES[arch, dtype.itemsize][branched]


def constants(arch: str, dtype: torch.dtype, sizes: tuple[int, int, int], branched: bool) -> dict[str, Any]:
    """The compile-time arguments for sizes I, O and r."""
    inputs, outputs, rank = sizes
    launch = launch_of(arch, dtype, branched)
    # tl.dot needs a depth of at least 16. With 64, ranks above 32 and widths that are not aligned, Triton 3.6 takes
    # 245,760 bytes of shared memory for one branch, and an H200 has 232,448.
    block = min(max(triton.next_power_of_2(rank), 16), launch.block_k, 32)
    shape = {"INPUTS": inputs, "OUTPUTS": outputs, "RANK": rank, "BLOCK_RANK": block, "BRANCHED": branched}
    return shape | tile_constants(launch, arch, dtype)


def programs_of(launch: Launch, rows: int, outputs: int) -> int:
    return triton.cdiv(rows, launch.block_m) * triton.cdiv(outputs, launch.block_n)


def project_forward(x: Tensor, w: Tensor, b_up: Tensor, reads: Tensor) -> Tensor:
    """y [S, R, O] in the dtype of x, which all tensors have; the module's docstring has the shapes."""
    (branches, rows, rank), (outputs, inputs) = reads.shape, w.shape
    arch, branched = architecture(x.device), branches > 1
    launch = launch_of(arch, x.dtype, branched)
    y = torch.empty((branches, rows, outputs), dtype=x.dtype, device=x.device)
    with on(x.device):
        plastic_project[(programs_of(launch, rows, outputs),)](
            *(x, w, b_up, reads, y, rows, branches),
            **constants(arch, x.dtype, (inputs, outputs, rank), branched),
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
    return y


def builds(arch: str) -> list[Build]:
    """Every rank of RANKS in every dtype, with one branch and with three, at R 32768 and I = O = 2048."""
    return [build(arch, dtype, rank, branched) for dtype in NAMES for rank in RANKS for branched in (False, True)]


def build(arch: str, dtype: torch.dtype, rank: int, branched: bool) -> Build:
    """The kernel as it ships, with its cost."""
    rows, inputs, outputs = 32768, 2048, 2048
    launch, branches = launch_of(arch, dtype, branched), 3 if branched else 1
    sizes = constants(arch, dtype, (inputs, outputs, rank), branched)
    return Build(
        name="plastic_project",
        kernel=plastic_project,
        signature=dict.fromkeys(("x", "w", "b_up", "reads", "y"), f"*{NAMES[dtype]}")
        | dict.fromkeys(("rows", "branches"), "i32"),
        constants=sizes,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        programs=programs_of(launch, rows, outputs),
        flops=2 * rows * outputs * (inputs + branches * rank),
        bytes=dtype.itemsize * (rows * (inputs + branches * (rank + outputs)) + outputs * (inputs + rank)),
        trips=tuple(n for n in (inputs // launch.block_k, branches, rank // sizes["BLOCK_RANK"]) if n > 1),
    )
