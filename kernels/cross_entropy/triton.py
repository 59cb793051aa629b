"""Cross-entropy of a linear map on GPUs: cuBLAS products by chunks of rows, and a Triton kernel for the logits.

The formulas are in `reference_loss`. A chunk's logits [rows, V] have the products' dtype. A program handles one row. It
reads the row once for the maximum and the sum, both online (arXiv 1805.02867), and a second time, from L2, to replace
the logits by their gradient. So a row is read from memory once and written once. Sums are float32, in an order that
depends on shapes alone.

Memory besides the inputs: dweight in float32, dhidden, and one chunk of `chunk_rows` rows. Each chunk reads and writes
dweight, 8 V D bytes. At V 50,272 and D 2,048 that is 0.19 ms of an H200, the time of the product of 735 rows at
790 TFLOP/s. For the 16,384 rows of a micro-batch it is 26 GB in chunks of 512 rows, and 6.6 GB in chunks of 2,048.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdrmix.kernels.common.products import add_product
from cdrmix.kernels.common.triton_helpers import Build, narrow
from cdrmix.kernels.cross_entropy import reference as reference_loss
from cdrmix.kernels.moe.triton_rows import on

BLOCK = 4096  # logits of a row that a program holds at a time: 16 a thread
WARPS = 8
ALIGNED = 128  # the rows of a chunk are a multiple of it, the tile of the product
PITCH = 64  # rows of logits begin at multiples of it, so that loads are of 16 bytes for every V
MOST_CHUNK_ROWS = 2048  # from about 735 rows on, the product takes longer than reading and writing dweight
LEAST_CHUNK_BYTES = 1 << 25  # for small models, fewer launches; 2,048 rows of 8,192 bfloat16 logits
REFERENCE_SHAPE = (8192, 2048, 50272)  # rows, D, V of the benchmark


@triton.jit(do_not_specialize=["count", "first", "ignore_index", "z_loss", "label_smoothing"])
def cross_entropy_rows(
    logits, targets, weights, losses, count, first, ignore_index, z_loss, label_smoothing,
    V: tl.constexpr, ROW: tl.constexpr, SETS: tl.constexpr, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr,
    GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The losses [SETS, count] of a row, and its gradient in place of its logits [rows, ROW]; first: of the chunk."""
    line = logits + tl.program_id(0).to(tl.int64) * ROW
    row = first + tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    both = 0.0  # sum of the weights over all sets
    some = 0
    for k in tl.static_range(SETS):
        target = tl.load(targets + k * count + row)
        scale = 1.0
        if WEIGHTED:
            scale = tl.load(weights + k * count + row).to(tl.float32)
        both += tl.where(target != ignore_index, scale, 0.0)
        some += ((target != ignore_index) & (scale != 0.0)).to(tl.int32)

    # One maximum for all columns; each thread sums its own columns until the end.
    top = float("-inf")
    total = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        inside = start + columns < V
        x = tl.load(line + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        x = tl.where(some != 0, x, 0.0)  # a row without a target that counts may hold anything
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
        if SMOOTH:
            plain += tl.where(inside, x, 0.0)
    lse = top + tl.log(tl.sum(total, 0))
    for k in tl.static_range(SETS):
        target = tl.load(targets + k * count + row)
        scale = 1.0
        if WEIGHTED:
            scale = tl.load(weights + k * count + row).to(tl.float32)
        counts = (target != ignore_index) & (scale != 0.0)
        known = counts & (target >= 0) & (target < V)
        chosen = tl.load(line + target, mask=known, other=float("nan")).to(tl.float32)
        loss = (lse - chosen) * (1.0 - label_smoothing) + z_loss * lse * lse
        if SMOOTH:
            loss += (lse - tl.sum(plain, 0) / V) * label_smoothing
        tl.store(losses + k * count + row, tl.where(counts, scale * loss, 0.0))
    if GRADIENT:
        tl.debug_barrier()  # all threads have read the chosen logits before the gradient overwrites them
        factor = both * (1.0 + 2.0 * z_loss * lse)
        spread = both * label_smoothing / V
        for start in range(0, V, BLOCK):
            inside = start + columns < V
            x = tl.load(line + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
            x = tl.where(some != 0, x, 0.0)
            dx = factor * tl.exp(x - lse) - spread
            for k in tl.static_range(SETS):
                target = tl.load(targets + k * count + row)
                scale = 1.0
                if WEIGHTED:
                    scale = tl.load(weights + k * count + row).to(tl.float32)
                dx -= tl.where(
                    (start + columns == target) & (target != ignore_index), scale * (1.0 - label_smoothing), 0.0
                )
            tl.store(line + start + columns, narrow(dx, logits.dtype.element_ty), mask=inside)


def chunk_rows(rows: int, D: int, V: int, itemsize: int, *, rounded: bool) -> int:
    """The rows of a chunk, at most MOST_CHUNK_ROWS.

    The chunk's logits, rows V itemsize bytes, should be small compared with dweight, 4 V D bytes; but LEAST_CHUNK_BYTES
    are always allowed. rounded: dweight is returned in 16 bits; that copy of 2 V D bytes exists only after the chunk is
    freed, so three quarters of its size cost nothing. Otherwise the chunk may take half of dweight, 2 V D bytes: 2,048
    rows of 16 bits at D 2,048, 206 MB for 412 MB of dweight.
    """
    wanted = D * 3 // 4 if rounded else 2 * D // itemsize
    least = LEAST_CHUNK_BYTES // (V * itemsize)
    return min(rows, triton.cdiv(max(min(wanted, MOST_CHUNK_ROWS), least, 1), ALIGNED) * ALIGNED)


def cross_entropy_forward(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_KN: Tensor,
    weights_KN: Tensor | None,
    *,
    z_loss: float,
    label_smoothing: float,
    ignore_index: int,
    wants_hidden: bool,
    wants_weight: bool,
    rounded: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference_loss.cross_entropy_forward`, with float32 losses and dweight. rounded: see `chunk_rows`."""
    N, D = hidden_ND.shape
    V, sets = weight_VD.shape[0], len(targets_KN)
    device, dtype = hidden_ND.device, hidden_ND.dtype
    losses_KN = torch.empty((sets, N), dtype=torch.float32, device=device)
    dhidden_ND = torch.empty((N, D) if wants_hidden else (0,), dtype=dtype, device=device)
    dweight_VD = torch.empty((V, D) if wants_weight else (0,), dtype=torch.float32, device=device).zero_()
    if N == 0:
        return losses_KN, dhidden_ND, dweight_VD
    size = chunk_rows(N, D, V, dtype.itemsize, rounded=rounded)
    weight_VD = weight_VD.to(dtype)
    memory = torch.empty((size, triton.cdiv(V, PITCH) * PITCH), dtype=dtype, device=device)
    ignored_N1 = ~reference_loss.counted(targets_KN, weights_KN, ignore_index).any(0).unsqueeze(-1)
    gradient = wants_hidden or wants_weight
    with on(device):
        for first in range(0, N, size):
            rows = slice(first, first + size)
            hidden = hidden_ND[rows]
            logits = memory[: len(hidden), :V]
            torch.mm(hidden, weight_VD.mT, out=logits)
            cross_entropy_rows[(len(hidden),)](
                *(logits, targets_KN, targets_KN if weights_KN is None else weights_KN, losses_KN),
                *(N, first, ignore_index, z_loss, label_smoothing),
                **_constants(V, sets, weights_KN is not None, label_smoothing != 0, gradient),
                num_warps=WARPS,
            )
            if wants_hidden:
                torch.mm(logits, weight_VD, out=dhidden_ND[rows])
            if wants_weight:  # ignored rows are set to 0: a gradient of 0 times inf or NaN would not be 0
                add_product(dweight_VD, logits, hidden.masked_fill(ignored_N1[rows], 0))
    return losses_KN, dhidden_ND, dweight_VD


def _constants(V: int, sets: int, weighted: bool, smooth: bool, gradient: bool) -> dict[str, int | bool]:
    pitch = triton.cdiv(V, PITCH) * PITCH
    flags = {"WEIGHTED": weighted, "SMOOTH": smooth, "GRADIENT": gradient}
    return {"V": V, "ROW": pitch, "SETS": sets, **flags, "BLOCK": min(BLOCK, max(64, triton.next_power_of_2(V)))}


def builds(arch: str) -> list[Build]:
    """The kernel at 8,192 rows and V 50,272 for every dtype; the same on every architecture.

    With one target set as training calls it, with four sets and every option, and without a gradient.
    """
    return list(_builds())


def _builds() -> Iterator[Build]:
    N, _, V = REFERENCE_SHAPE
    for dtype, itemsize in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
        for sets, options, gradient in ((1, False, True), (4, True, True), (1, False, False)):
            yield Build(
                name="cross_entropy_rows",
                kernel=cross_entropy_rows,
                signature={"logits": f"*{dtype}", "targets": "*i64", "weights": "*fp32", "losses": "*fp32"}
                | {"count": "i32", "first": "i32", "ignore_index": "i32", "z_loss": "fp32", "label_smoothing": "fp32"},
                constants=_constants(V, sets, True, options, gradient),
                num_warps=WARPS,
                num_stages=3,
                programs=N,
                flops=N * V * (10 if gradient else 5),
                bytes=N * (V * itemsize * (1 + gradient) + sets * 16),
                trips=(triton.cdiv(V, BLOCK),) * (1 + gradient),
            )
