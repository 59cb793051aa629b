"""The residual sum and its norm in Triton: each tensor read once and written once, statistics in float32.

The formulas are in `reference.py`. A program handles tiles of whole rows. The backward pass adds the norm's gradient
and the gradient of the sum from later layers in registers, where autograd would add them in a separate pass. For
weight and bias each program writes one row of partial sums, which torch.sum adds, in an order that depends on shapes
alone: no atomics, the same bits every time. Above SUMMED_WIDTH the partial sums of a row do not fit into the registers
next to the row, and a second kernel computes them by tiles of columns.

Bytes for a row of D in bfloat16: forward 8 D (x and y read, sum and norm written), backward 8 D, second kernel 4 D.
Kept for the backward pass: the sum, and 8 bytes of statistics (4 for rmsnorm). Plain PyTorch with a float32 stream and
bfloat16 branches: 18 D forward (sum, then norm), 24 D backward (norm, then sum of the gradients), and casts.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdrmix.kernels.common.triton_helpers import Build, narrow
from cdrmix.kernels.moe.triton_rows import on

ELEMENTS = 1024  # of a tile at least: 8 for each thread of 4 warps
WIDEST = 16384  # largest D: 32 elements for each thread of 16 warps
SUMMED_WIDTH = 4096  # largest D of the backward kernel that also sums over rows
PROGRAMS = 512  # most programs of the backward pass: one wave of 4 on each of an H200's 132 multiprocessors
LEAST_STEPS = 4  # least tiles of a backward program, if there are so many: each program writes its sums once
SUM_ROWS, SUM_COLUMNS = 16, 64  # tile of the kernel that computes only the sums
REFERENCE_SHAPE = (8 * 4096, 2048)  # rows and D of the estimates


@triton.jit
def _read(pointer, offset, mask):
    return tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "eps"])
def add_norm_forward_kernel(
    x, y, weight, bias, total, normed, statistics, rows, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    HAS_Y: tl.constexpr, CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """total = x + y and normed, [rows, D]; statistics [1 or 2, rows]: 1 / deviation, then the mean."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < D)[None, :]
    here = row.to(tl.int64)[:, None] * D + column[None, :]
    tile = _read(x, here, inside)
    if HAS_Y:
        rounded = narrow(tile + _read(y, here, inside), total.dtype.element_ty)
        tl.store(total + here, rounded, mask=inside)
        tile = rounded.to(tl.float32)  # the rounded sum, which the backward pass reads
    if CENTRED:
        mean = tl.sum(tile, 1) / D
        tl.store(statistics + rows + row, mean, mask=row < rows)
        tile = tl.where(inside, tile - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(tile * tile, 1) / D + eps)
    tl.store(statistics + row, inverse, mask=row < rows)
    tile = tile * inverse[:, None] * _read(weight, column, column < D)[None, :]
    if HAS_BIAS:
        tile += _read(bias, column, column < D)[None, :]
    tl.store(normed + here, narrow(tile, normed.dtype.element_ty), mask=inside)


@triton.jit
def _standardised(total, statistics, here, row, inside, rows, CENTRED: tl.constexpr):
    """The sum less its mean, divided by its deviation; and 1 / deviation."""
    tile = _read(total, here, inside)
    inverse = tl.load(statistics + row, mask=row < rows, other=0.0)[:, None]
    if CENTRED:
        tile -= tl.load(statistics + rows + row, mask=row < rows, other=0.0)[:, None]
    return tile * inverse, inverse


@triton.jit(do_not_specialize=["rows", "steps"])
def add_norm_backward_kernel(
    dnormed, dtotal, total, weight, statistics, dx, dy, partial, rows, steps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_DTOTAL: tl.constexpr, HAS_DY: tl.constexpr,
    CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """dx [rows, D], the same in dy's dtype (HAS_DY), and partial sums [programs, 1 or 2, D] of dweight and dbias."""
    column = tl.arange(0, BLOCK)
    scale = _read(weight, column, column < D)[None, :]
    dweight, dbias = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(steps):
        row = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < D)[None, :]
        here = row.to(tl.int64)[:, None] * D + column[None, :]
        standard, inverse = _standardised(total, statistics, here, row, inside, rows, CENTRED)
        gradient = _read(dnormed, here, inside)
        if SUMS:
            dweight += gradient * standard
            if HAS_BIAS:
                dbias += gradient
        gradient *= scale
        change = gradient - standard * (tl.sum(gradient * standard, 1) / D)[:, None]
        if CENTRED:
            change -= (tl.sum(gradient, 1) / D)[:, None]
        change *= inverse
        if HAS_DTOTAL:
            change += _read(dtotal, here, inside)
        tl.store(dx + here, narrow(change, dx.dtype.element_ty), mask=inside)
        if HAS_DY:
            tl.store(dy + here, narrow(change, dy.dtype.element_ty), mask=inside)
    if SUMS:
        line = partial + tl.program_id(0).to(tl.int64) * (D + D * HAS_BIAS) + column
        tl.store(line, tl.sum(dweight, 0), mask=column < D)
        if HAS_BIAS:
            tl.store(line + D, tl.sum(dbias, 0), mask=column < D)


@triton.jit(do_not_specialize=["rows", "steps"])
def add_norm_sums_kernel(
    dnormed, total, statistics, partial, rows, steps,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """The partial sums of `add_norm_backward_kernel` for rows too wide for it. A program handles COLUMNS columns."""
    across = tl.cdiv(D, COLUMNS)
    program = tl.program_id(0) // across
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    dweight, dbias = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(steps):
        row = (program * steps + step) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < D)[None, :]
        here = row.to(tl.int64)[:, None] * D + column[None, :]
        standard, _ = _standardised(total, statistics, here, row, inside, rows, CENTRED)
        gradient = _read(dnormed, here, inside)
        dweight += gradient * standard
        if HAS_BIAS:
            dbias += gradient
    line = partial + program.to(tl.int64) * (D + D * HAS_BIAS) + column
    tl.store(line, tl.sum(dweight, 0), mask=column < D)
    if HAS_BIAS:
        tl.store(line + D, tl.sum(dbias, 0), mask=column < D)


def _tile(width: int) -> tuple[dict[str, int], dict[str, int]]:
    """Constants and options of a kernel with whole rows of that width."""
    assert 0 < width <= WIDEST
    block = triton.next_power_of_2(width)
    rows = max(1, ELEMENTS // block)
    warps = min(16, max(4, rows * block // 256))  # 16 is the most on gfx942, where a warp has 64 threads
    return {"D": width, "BLOCK": block, "ROWS": rows}, {"num_warps": warps, "num_stages": 1}


def _steps(rows: int, tile_rows: int) -> int:
    """Tiles of a backward program: so many that PROGRAMS programs suffice, but at least LEAST_STEPS."""
    tiles = triton.cdiv(rows, tile_rows)
    return max(min(tiles, LEAST_STEPS), triton.cdiv(tiles, PROGRAMS))


def add_norm_forward(
    x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, *, eps: float, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """x + y in x's dtype (empty without y), its norm in dtype, and statistics for the backward pass."""
    width = x.shape[-1]
    rows = x.numel() // width
    assert rows < 2**31
    total = x.new_empty(0) if y is None else torch.empty_like(x)
    normed = torch.empty_like(x, dtype=dtype)
    statistics = x.new_empty(2 if centred else 1, rows, dtype=torch.float32)
    if rows:
        constants, options = _tile(width)
        flags = {"HAS_Y": y is not None, "CENTRED": centred, "HAS_BIAS": bias is not None}
        with on(x.device):
            add_norm_forward_kernel[(triton.cdiv(rows, constants["ROWS"]),)](
                x, x if y is None else y, weight, weight if bias is None else bias,
                total, normed, statistics, rows, eps, **constants, **flags, **options,
            )  # fmt: skip
    return total, normed, statistics


def add_norm_backward(
    dnormed: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    statistics: Tensor,
    *,
    has_bias: bool,
    y_dtype: torch.dtype | None,
    wants_sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx in total's dtype; dy (empty where y_dtype is None); dweight and dbias, float32 [1 or 2, D].

    dweight and dbias are zeros unless `wants_sums`.
    """
    width = total.shape[-1]
    rows = total.numel() // width
    dx = torch.empty_like(total)
    dy = total.new_empty(0) if y_dtype is None else torch.empty_like(total, dtype=y_dtype)
    count = 2 if has_bias else 1
    if not rows:
        return dx, dy, total.new_zeros(count, width, dtype=torch.float32)
    constants, options = _tile(width)
    steps = _steps(rows, constants["ROWS"])
    programs = triton.cdiv(rows, steps * constants["ROWS"])
    fused = wants_sums and width <= SUMMED_WIDTH
    norm = {"CENTRED": len(statistics) == 2, "HAS_BIAS": has_bias}
    flags = {"HAS_DTOTAL": dtotal is not None, "HAS_DY": y_dtype is not None, "SUMS": fused}
    partial = total.new_empty(programs if fused else 0, count, width, dtype=torch.float32)
    with on(total.device):
        add_norm_backward_kernel[(programs,)](
            dnormed, dnormed if dtotal is None else dtotal, total, weight, statistics, dx, dy, partial, rows, steps,
            **constants, **flags, **norm, **options,
        )  # fmt: skip
        if wants_sums and not fused:
            steps = _steps(rows, SUM_ROWS)
            programs = triton.cdiv(rows, steps * SUM_ROWS)
            partial = total.new_empty(programs, count, width, dtype=torch.float32)
            add_norm_sums_kernel[(programs * triton.cdiv(width, SUM_COLUMNS),)](
                dnormed, total, statistics, partial, rows, steps,
                D=width, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, **norm, num_warps=4, num_stages=1,
            )  # fmt: skip
    return dx, dy, partial.sum(0)


def _build(kernel: str, width: int, stream: str, branch: str, *, centred: bool, has_y: bool = True) -> Build:
    """A kernel with REFERENCE_SHAPE's rows; stream: dtype of the sums; branch: dtype of y and of the norm."""
    rows = REFERENCE_SHAPE[0]
    found = {"forward": add_norm_forward_kernel, "backward": add_norm_backward_kernel, "sums": add_norm_sums_kernel}
    constants, options = _tile(width)
    norm = {"CENTRED": centred, "HAS_BIAS": centred}
    known = dict.fromkeys(("x", "total", "dtotal", "dx"), f"*{stream}")
    known |= dict.fromkeys(("y", "normed", "dnormed", "dy"), f"*{branch}")
    known |= dict.fromkeys(("weight", "bias", "statistics", "partial"), "*fp32")
    known |= {"rows": "i32", "steps": "i32", "eps": "fp32"}
    sizes = {"*bf16": 2, "*fp16": 2, "*fp32": 4}
    moved: tuple[str, ...]
    if kernel == "forward":
        constants |= norm | {"HAS_Y": has_y}
        moved, flops, programs, trips = ("x", "y", "total", "normed"), 8, triton.cdiv(rows, constants["ROWS"]), 1
    elif kernel == "backward":
        fused, two = width <= SUMMED_WIDTH, stream != branch
        constants |= {"HAS_DTOTAL": True, "HAS_DY": two, "SUMS": fused} | norm
        moved = ("dnormed", "dtotal", "total", "dx", *(["dy"] if two else []))
        trips = _steps(rows, constants["ROWS"])
        flops, programs = 14, triton.cdiv(rows, trips * constants["ROWS"])
    else:
        constants = {"D": width, "ROWS": SUM_ROWS, "COLUMNS": SUM_COLUMNS} | norm
        moved, options = ("dnormed", "total"), {"num_warps": 4, "num_stages": 1}
        trips = _steps(rows, SUM_ROWS)
        flops, programs = 5, triton.cdiv(rows, trips * SUM_ROWS) * triton.cdiv(width, SUM_COLUMNS)
    return Build(
        f"add_norm_{kernel}",
        found[kernel],
        {name: known[name] for name in found[kernel].arg_names if name in known},
        constants,
        **options,
        programs=programs,
        flops=flops * rows * width,
        bytes=rows * width * sum(sizes[known[name]] for name in moved),
        trips=(trips,) if trips > 1 else (),
        variant="" if stream == branch else f"stream={stream}",
    )


def builds(arch: str) -> list[Build]:
    """Every kernel with all options of a layernorm, at the widths of the named sizes, of core-tiny, and one that is no
    power of two; at 2,048 also an rmsnorm, and one without y. The same on every architecture."""
    return list(_builds())


def _builds() -> Iterator[Build]:
    for stream, branch in (("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp16"), ("fp32", "fp32")):
        for width in (128, 2048, 3072, 6144, 12288):
            for kernel in ("forward", "backward", *(["sums"] if width > SUMMED_WIDTH else [])):
                yield _build(kernel, width, stream, branch, centred=True)
        for kernel in ("forward", "backward"):
            yield _build(kernel, 2048, stream, branch, centred=False)
        yield _build("forward", 2048, stream, branch, centred=True, has_y=False)
