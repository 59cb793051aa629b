"""The experts' grouped matrix products in Triton: rows are gathered while they are loaded, activations are epilogues.

Sorted rows r (triton_rows.py) of expert e, Z = F (relu2) or 2 F (swiglu, interleaved: column 2 f gate, 2 f + 1 up):
    moe_up          Z_r = x[token_r] W_up[e],  A_r = act(Z_r)
    moe_rows_gemm   Y_r = A_r W_down[e];  in the backward pass dX_r = dZ_r W_up[e]^T
    moe_gradient    dA'_r = dy[token_r] W_down[e]^T,  dZ_r = w_r dA'_r act'(Z_r),  w_r A_r,  and the row's
                    <dA'_r, A_r> over the columns of a tile: w_r's gradient is their sum (moe_weight_gradient)
    moe_weight_product   dW_down[e] = (w A)^T dy[token],  dW_up[e] = x[token]^T dZ: sums over the rows of an expert,
                         written, or added in float32 to the sum of earlier micro-batches
A row tile belongs to one expert (the table of moe_plan). A tile's missing rows repeat its last row and are not stored.
Products are summed in float32, each by one tl.dot: products are not interleaved, and none takes a transposed result.

Consecutive programs share a group of row tiles, so that the parts of x and W they read are in L2. Base offsets are
int64, because R Z and E D Z exceed 2^31. Sizes are compile-time constants, so aligned rows are loaded 16 bytes at a
time, and sizes that are whole tiles need no masks.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from cdrmix.kernels.common.triton_helpers import dot_add, narrow


@triton.jit
def tile_of(program, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Row tile and column tile of a program: groups of GROUP row tiles by all column tiles, row tiles first."""
    first = program // (GROUP * column_tiles) * GROUP
    rows = tl.minimum(row_tiles - first, GROUP)
    within = program % (GROUP * column_tiles)
    return first + within % rows, within // rows


@triton.jit
def gathered_product(
    left, rows, right, column,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, NEXT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """left[rows] @ right in float32, for the BLOCK_N columns from `column` on.

    left has rows of DEPTH; rows is int64 [BLOCK_M]. right is [DEPTH, WIDTH], with strides STEP along the depth and NEXT
    along the width.
    """
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    return add_gathered_product(
        total, left, rows, right, column, DEPTH, WIDTH, STEP, NEXT, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION
    )


@triton.jit
def add_gathered_product(
    total, left, rows, right, column,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, NEXT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """total [BLOCK_M, BLOCK_N] float32 plus `gathered_product`, which is summed after it."""
    depth = tl.arange(0, BLOCK_K)
    columns = column + tl.arange(0, BLOCK_N)
    left_tile = left + rows[:, None] * DEPTH + depth[None, :]
    right_tile = right + column.to(tl.int64) * NEXT + (depth[:, None] * STEP + tl.arange(0, BLOCK_N)[None, :] * NEXT)
    for first in range(0, DEPTH, BLOCK_K):
        if DEPTH % BLOCK_K == 0:
            a = tl.load(left_tile)
            if WIDTH % BLOCK_N == 0:
                b = tl.load(right_tile)
            else:
                b = tl.load(right_tile, mask=(columns < WIDTH)[None, :], other=0.0)
        else:
            a = tl.load(left_tile, mask=(depth < DEPTH - first)[None, :], other=0.0)
            inside = (depth < DEPTH - first)[:, None] & (columns < WIDTH)[None, :]
            b = tl.load(right_tile, mask=inside, other=0.0)
        total = dot_add(a, b, total, PRECISION)
        left_tile += BLOCK_K
        right_tile += BLOCK_K * STEP
    return total


@triton.jit
def store_rows(out, rows, inside, columns, x, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """Stores x to rows of WIDTH, in the tensor's dtype; WHOLE: all columns are inside."""
    mask = inside[:, None]
    if not WHOLE:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(out + rows[:, None] * WIDTH + columns[None, :], narrow(x, out.dtype.element_ty), mask=mask)


@triton.jit
def add_to_rows(
    out, rows, inside, column, x,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds x [BLOCK_M, BLOCK_N] to float32 rows of WIDTH, from `column` on, in PARTS pieces by columns."""
    if PARTS > 1:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = halves(x, BLOCK_M, HALF)
        add_to_rows(out, rows, inside, column, left, WIDTH, PARTS // 2, BLOCK_M, HALF)
        add_to_rows(out, rows, inside, column + HALF, right, WIDTH, PARTS // 2, BLOCK_M, HALF)
    else:
        columns = column + tl.arange(0, BLOCK_N)
        mask = inside[:, None] & (columns < WIDTH)[None, :]
        address = out + rows[:, None] * WIDTH + columns[None, :]
        tl.store(address, tl.load(address, mask=mask, other=0.0) + x, mask=mask)


@triton.jit
def pairs(x, M: tl.constexpr, N: tl.constexpr):
    """Even and odd columns of x [M, 2 N]."""
    return tl.split(tl.reshape(x, [M, N, 2]))


@triton.jit
def halves(x, M: tl.constexpr, N: tl.constexpr):
    """Left and right half of the columns of x [M, 2 N]; no element moves to another register."""
    return tl.split(tl.permute(tl.reshape(x, [M, 2, N]), [0, 2, 1]))


@triton.jit
def up_columns(
    total, z, hidden, rows, inside, column,
    F: tl.constexpr, GATED: tl.constexpr, SAVE_Z: tl.constexpr, SAVE_A: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """moe_up's epilogue for BLOCK_N columns, in PARTS pieces; WHOLE: all columns are inside."""
    if PARTS > 1:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = halves(total, BLOCK_M, HALF)
        up_columns(left, z, hidden, rows, inside, column, F, GATED, SAVE_Z, SAVE_A, PARTS // 2, BLOCK_M, HALF, WHOLE)
        up_columns(
            right, z, hidden, rows, inside, column + HALF, F, GATED, SAVE_Z, SAVE_A, PARTS // 2, BLOCK_M, HALF, WHOLE
        )
    else:
        columns = column + tl.arange(0, BLOCK_N)
        if SAVE_Z:
            store_rows(z, rows, inside, columns, total, 2 * F if GATED else F, WHOLE)
        if SAVE_A:
            if GATED:
                gate, up = pairs(total, BLOCK_M, BLOCK_N // 2)
                A = gate * tl.sigmoid(gate) * up
                store_rows(hidden, rows, inside, column // 2 + tl.arange(0, BLOCK_N // 2), A, F, WHOLE)
            else:
                A = positive(total)
                store_rows(hidden, rows, inside, columns, A * A, F, WHOLE)


@triton.jit
def up_tile(
    program, x, w_up, tokens, table, z, hidden, row_tiles,
    D: tl.constexpr, F: tl.constexpr, GATED: tl.constexpr, SAVE_Z: tl.constexpr, SAVE_A: tl.constexpr,
    PARTS: tl.constexpr, USED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of moe_up; USED: it has rows."""
    Z: tl.constexpr = 2 * F if GATED else F
    tile, column = tile_of(program, row_tiles, tl.cdiv(Z, BLOCK_N), GROUP)
    expert = tl.load(table + tile * 3).to(tl.int64)
    first, end = tl.load(table + tile * 3 + 1), tl.load(table + tile * 3 + 2)
    if not USED:  # noqa: SIM102 - Triton evaluates an `if` of constants before it compiles the body
        if first >= end:
            return
    column = column * BLOCK_N
    rows = first + tl.arange(0, BLOCK_M)
    token = tl.load(tokens + tl.minimum(rows, end - 1)).to(tl.int64)
    total = gathered_product(
        x, token, w_up + expert * (D * Z), column, D, Z, Z, 1, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION
    )
    up_columns(
        total, z, hidden, rows.to(tl.int64), rows < end, column,
        F, GATED, SAVE_Z, SAVE_A, PARTS, BLOCK_M, BLOCK_N, Z % BLOCK_N == 0,
    )  # fmt: skip


@triton.jit(do_not_specialize=["row_tiles"])
def moe_up(
    x, w_up, tokens, table, z, hidden, row_tiles,
    D: tl.constexpr, F: tl.constexpr, GATED: tl.constexpr, SAVE_Z: tl.constexpr, SAVE_A: tl.constexpr,
    PARTS: tl.constexpr, PERSISTENT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """z [R, Z] and hidden = act(z) [R, F]; SAVE_Z and SAVE_A: whether each is stored."""
    if PERSISTENT:
        used = tl.load(table + row_tiles * 3)
        for program in range(tl.program_id(0), used * tl.cdiv(2 * F if GATED else F, BLOCK_N), tl.num_programs(0)):
            up_tile(
                program, x, w_up, tokens, table, z, hidden, used,
                D, F, GATED, SAVE_Z, SAVE_A, PARTS, True, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PRECISION,
            )  # fmt: skip
    else:
        up_tile(
            tl.program_id(0), x, w_up, tokens, table, z, hidden, row_tiles,
            D, F, GATED, SAVE_Z, SAVE_A, PARTS, False, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PRECISION,
        )  # fmt: skip


@triton.jit
def rows_tile(
    program, left, w, table, out, row_tiles,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr, USED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of moe_rows_gemm; USED: it has rows."""
    tile, column = tile_of(program, row_tiles, tl.cdiv(WIDTH, BLOCK_N), GROUP)
    expert = tl.load(table + tile * 3).to(tl.int64)
    first, end = tl.load(table + tile * 3 + 1), tl.load(table + tile * 3 + 2)
    if not USED:  # noqa: SIM102 - Triton evaluates an `if` of constants before it compiles the body
        if first >= end:
            return
    column = column * BLOCK_N
    rows = first + tl.arange(0, BLOCK_M)
    total = gathered_product(
        left, tl.minimum(rows, end - 1).to(tl.int64), w + expert * (DEPTH * WIDTH), column,
        DEPTH, WIDTH, 1 if TRANSPOSED else WIDTH, DEPTH if TRANSPOSED else 1, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    store_rows(out, rows.to(tl.int64), rows < end, column + tl.arange(0, BLOCK_N), total, WIDTH, WIDTH % BLOCK_N == 0)


@triton.jit(do_not_specialize=["row_tiles"])
def moe_rows_gemm(
    left, w, table, out, row_tiles,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr, PERSISTENT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [R, WIDTH] = left [R, DEPTH] @ the expert's matrix [DEPTH, WIDTH], or the transpose of its [WIDTH, DEPTH]."""
    if PERSISTENT:
        used = tl.load(table + row_tiles * 3)
        for program in range(tl.program_id(0), used * tl.cdiv(WIDTH, BLOCK_N), tl.num_programs(0)):
            rows_tile(
                program, left, w, table, out, used,
                DEPTH, WIDTH, TRANSPOSED, True, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PRECISION,
            )  # fmt: skip
    else:
        rows_tile(
            tl.program_id(0), left, w, table, out, row_tiles,
            DEPTH, WIDTH, TRANSPOSED, False, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, PRECISION,
        )  # fmt: skip


@triton.jit
def positive(x):
    """relu that keeps NaN; tl.maximum would drop it."""
    return tl.where(x < 0, 0.0, x)


@triton.jit
def gradient_columns(
    dA, z, dz, weighted, weight, rows, inside, column,
    F: tl.constexpr, GATED: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """moe_gradient's epilogue for WIDTH columns, in PARTS pieces; returns <dA', A> of each row over them."""
    if PARTS >= 4:  # all four at once take 128 registers on sm_90; two halves, each split again, take 136
        W: tl.constexpr = WIDTH // 4
        left, right = halves(dA, BLOCK_M, 2 * W)
        a, b = halves(left, BLOCK_M, W)
        c, d = halves(right, BLOCK_M, W)
        sums = gradient_columns(
            a, z, dz, weighted, weight, rows, inside, column, F, GATED, PARTS // 4, BLOCK_M, W, WHOLE
        )
        sums += gradient_columns(
            b, z, dz, weighted, weight, rows, inside, column + W, F, GATED, PARTS // 4, BLOCK_M, W, WHOLE
        )
        sums += gradient_columns(
            c, z, dz, weighted, weight, rows, inside, column + 2 * W, F, GATED, PARTS // 4, BLOCK_M, W, WHOLE
        )
        sums += gradient_columns(
            d, z, dz, weighted, weight, rows, inside, column + 3 * W, F, GATED, PARTS // 4, BLOCK_M, W, WHOLE
        )
    elif PARTS == 2:
        HALF: tl.constexpr = WIDTH // 2
        left, right = halves(dA, BLOCK_M, HALF)
        sums = gradient_columns(left, z, dz, weighted, weight, rows, inside, column, F, GATED, 1, BLOCK_M, HALF, WHOLE)
        sums += gradient_columns(
            right, z, dz, weighted, weight, rows, inside, column + HALF, F, GATED, 1, BLOCK_M, HALF, WHOLE
        )
    else:
        columns = column + tl.arange(0, WIDTH)
        mask = inside[:, None]
        if not WHOLE:
            mask = mask & (columns < F)[None, :]
        offsets = rows[:, None] * F + columns[None, :]
        if GATED:
            wide = 2 * column + tl.arange(0, 2 * WIDTH)
            wide_mask = inside[:, None]
            if not WHOLE:
                wide_mask = wide_mask & (wide < 2 * F)[None, :]
            wide_offsets = rows[:, None] * (2 * F) + wide[None, :]
            gate, up = pairs(tl.load(z + wide_offsets, mask=wide_mask, other=0.0).to(tl.float32), BLOCK_M, WIDTH)
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            A = silu * up
            scaled = weight[:, None] * dA
            dgate, dup = scaled * up * (sigmoid + silu * (1 - sigmoid)), scaled * silu
            dz_tile = tl.reshape(tl.join(dgate, dup), [BLOCK_M, 2 * WIDTH])
            tl.store(dz + wide_offsets, narrow(dz_tile, dz.dtype.element_ty), mask=wide_mask)
        else:
            relu = positive(tl.load(z + offsets, mask=mask, other=0.0).to(tl.float32))
            A = relu * relu
            tl.store(dz + offsets, narrow(weight[:, None] * dA * 2 * relu, dz.dtype.element_ty), mask=mask)
        tl.store(weighted + offsets, narrow(weight[:, None] * A, weighted.dtype.element_ty), mask=mask)
        sums = tl.sum(dA * A, 1)
    return sums


@triton.jit(do_not_specialize=["row_tiles", "routes"])
def moe_gradient(
    dy, w_down, tokens, table, order, weights, z, dz, weighted, partial, row_tiles, routes,
    D: tl.constexpr, F: tl.constexpr, GATED: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dz [R, Z], weighted = w act(z) [R, F], and partial [column tiles, R] float32, each row's <dA', A> over a tile.

    The epilogue takes the tile in PARTS pieces by columns; as a whole it would spill registers.
    """
    tile, column = tile_of(tl.program_id(0), row_tiles, tl.cdiv(F, BLOCK_N), GROUP)
    expert = tl.load(table + tile * 3).to(tl.int64)
    first, end = tl.load(table + tile * 3 + 1), tl.load(table + tile * 3 + 2)
    if first >= end:
        return
    partial += column.to(tl.int64) * routes
    column = column * BLOCK_N
    rows = first + tl.arange(0, BLOCK_M)
    token = tl.load(tokens + tl.minimum(rows, end - 1)).to(tl.int64)
    total = gathered_product(
        dy, token, w_down + expert * (F * D), column, D, F, 1, D, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION
    )
    inside = rows < end
    weight = tl.load(weights + tl.load(order + tl.minimum(rows, end - 1)))
    rows = rows.to(tl.int64)
    sums = gradient_columns(
        total, z, dz, weighted, weight, rows, inside, column,
        F, GATED, PARTS, BLOCK_M, BLOCK_N, F % BLOCK_N == 0,
    )  # fmt: skip
    tl.store(partial + rows, sums, mask=inside)


@triton.jit(do_not_specialize=["routes"])
def moe_weight_gradient(
    partial, order, counts, dweights, routes,
    E: tl.constexpr, PADDED_E: tl.constexpr, PARTIALS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dweights [T, K] float32: each row's partial sums [PARTIALS, R], added in order; 0 where the route was dropped."""
    experts = tl.arange(0, PADDED_E)
    kept = tl.sum(tl.load(counts + experts, mask=experts < E, other=0))
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(PARTIALS):
        total += tl.load(partial + rows, mask=rows < kept, other=0.0)
        partial += routes
    route = tl.load(order + rows, mask=rows < routes, other=0)
    tl.store(dweights + route, total, mask=rows < routes)


@triton.jit
def add_weight_product(
    total, left, right, tokens, first, end, columns_m, columns_n,
    M: tl.constexpr, N: tl.constexpr, GATHER_LEFT: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """total plus the product of BLOCK_K rows from `first` on; WHOLE: all of them lie before `end`."""
    rows = first + tl.arange(0, BLOCK_K)
    inside = rows < end
    token = tl.load(tokens + rows) if WHOLE else tl.load(tokens + rows, mask=inside, other=0)
    token, rows = token.to(tl.int64), rows.to(tl.int64)
    left_rows = token if GATHER_LEFT else rows
    right_rows = rows if GATHER_LEFT else token
    left_at = left + left_rows[None, :] * M + columns_m[:, None]
    right_at = right + right_rows[:, None] * N + columns_n[None, :]
    if WHOLE:
        a = tl.load(left_at) if M % BLOCK_M == 0 else tl.load(left_at, mask=(columns_m < M)[:, None], other=0.0)
        b = tl.load(right_at) if N % BLOCK_N == 0 else tl.load(right_at, mask=(columns_n < N)[None, :], other=0.0)
    else:  # missing rows have to be zero in both operands: the memory there may hold NaN
        a = tl.load(left_at, mask=inside[None, :] & (columns_m < M)[:, None], other=0.0)
        b = tl.load(right_at, mask=inside[:, None] & (columns_n < N)[None, :], other=0.0)
    return dot_add(a, b, total, PRECISION)


@triton.jit
def moe_weight_product(
    left, right, tokens, counts, out,
    M: tl.constexpr, N: tl.constexpr, GATHER_LEFT: tl.constexpr, E: tl.constexpr, PADDED_E: tl.constexpr,
    ADD: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [E, M, N]: each expert's rows of left [., M], transposed, times its rows of right [., N]; zeros without rows.

    A last block that is not full is summed after the loop, so the loop has no masks, which would be a quarter of its
    instructions. One operand is gathered by token (left if GATHER_LEFT, else right); the other has sorted rows. With
    ADD the product is added to the float32 values in out, in PARTS pieces of a tile by columns; an expert without rows
    stays unchanged. One program reads and writes each element, so the sum has the same bits every time.
    """
    ROW_TILES: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    COLUMN_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    expert = tl.program_id(0) // (ROW_TILES * COLUMN_TILES)
    tile, column = tile_of(tl.program_id(0) % (ROW_TILES * COLUMN_TILES), ROW_TILES, COLUMN_TILES, GROUP)
    experts = tl.arange(0, PADDED_E)
    count = tl.load(counts + experts, mask=experts < E, other=0).to(tl.int32)
    end = tl.sum(tl.where(experts <= expert, count, 0))
    start = end - tl.sum(tl.where(experts == expert, count, 0))

    columns_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns_n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    whole = start + (end - start) // BLOCK_K * BLOCK_K
    for first in range(start, whole, BLOCK_K):
        total = add_weight_product(
            total, left, right, tokens, first, end, columns_m, columns_n, M, N, GATHER_LEFT, True,
            BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip
    if whole < end:
        total = add_weight_product(
            total, left, right, tokens, whole, end, columns_m, columns_n, M, N, GATHER_LEFT, False,
            BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip
    inside = columns_m < M
    out += expert.to(tl.int64) * (M * N)
    if ADD:
        if start < end:
            add_to_rows(out, columns_m.to(tl.int64), inside, column * BLOCK_N, total, N, PARTS, BLOCK_M, BLOCK_N)
    else:
        store_rows(out, columns_m.to(tl.int64), inside, columns_n, total, N, N % BLOCK_N == 0)
