"""The experts' products by torch._grouped_mm: for which products it is used, and the separate activations it needs.

`choice` alone decides between it and our kernels, from the table CHOICES, for each product:
    up        Z = x W_up and its activation   ours gathers x, and the activation is its epilogue; grouped_mm needs a
    gradient  dA' = dy W_down^T and dZ        sorted copy of x (moe_rows.dispatch), and a separate pass over Z
    rows      A W_down and dZ W_up^T          the rows are sorted already: it needs neither
Weight gradients always use our kernels: torch._grouped_mm rounds them to bfloat16, and a second pass would have to add
them in float32. It takes bfloat16 on NVIDIA GPUs from sm_90 on; elsewhere PyTorch loops over the experts and waits for
their counts. Rows must be multiples of 16 bytes. The host reads nothing back. It leaves the rows after the last
expert's uninitialised; nothing here reads them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from cdrmix.kernels.common.triton_helpers import Build
from cdrmix.kernels.moe.triton_gemm import gradient_columns, up_columns
from cdrmix.kernels.moe.triton_rows import NAMES, REFERENCE_SHAPE, on

OURS, GROUPED = "triton", "grouped_mm"
PRODUCTS = ("up", "gradient", "rows")
BLOCK_ROWS, BLOCK_COLUMNS, WARPS = 16, 256, 4  # of a program of the activation kernels
WIDE = 2048  # a shape is "wide" from so many hidden units of an expert on


@dataclass(frozen=True)
class Choice:
    """Who computes each of PRODUCTS, and the reason: an estimate of benchmarks/aot_time.py, or a measurement."""

    up: str
    gradient: str
    rows: str
    source: str


_ESTIMATE = (
    "estimate, H200, T 32768, D 2048, F 4608, E 8, k 2, swiglu: ours 3.5 to 3.6 ms for up with the activation, 1.6 to"
    " 1.7 and 3.3 to 3.4 ms for rows (690 to 750 TFLOP/s). grouped_mm would have to reach 800 TFLOP/s in up, where"
    " 0.5 ms go to the copy and the activation, and 720 in rows. Not measured; benchmarks/moe.py times both"
)
_NARROW = "no estimate; copy and activation cost as much, the products less: the wide shape's choice is used"
_SM100 = "no estimate for sm_100; ours until benchmarks/moe.py has measured both"
CHOICES: dict[tuple[str, str], Choice] = {
    ("sm_90", "wide"): Choice(OURS, OURS, OURS, _ESTIMATE),
    ("sm_90", "narrow"): Choice(OURS, OURS, OURS, _NARROW),
    ("sm_100", "wide"): Choice(OURS, OURS, OURS, _SM100),
    ("sm_100", "narrow"): Choice(OURS, OURS, OURS, _SM100),
}
_forced: list[str] = []  # at most one


def force(who: str | None) -> None:
    """Uses OURS or GROUPED for every product that it supports, instead of the table; None: the table again.

    For measurements and tests, in this process, from the next call on. A product that torch._grouped_mm does not
    support stays with our kernel.
    """
    assert who in (None, OURS, GROUPED), who
    _forced[:] = [who] if who else []


def choice(product: str, arch: str, hidden: int, left: Tensor, w: Tensor) -> str:
    """Who multiplies the rows of `left` by the experts' matrices w: OURS or GROUPED; hidden: units of an expert."""
    assert product in PRODUCTS, product
    found = CHOICES.get((arch, "wide" if hidden >= WIDE else "narrow"))
    wanted = _forced[0] if _forced else getattr(found, product) if found else OURS
    return wanted if wanted == OURS or takes(left, w, emulated=bool(_forced)) else OURS


def takes(left: Tensor, w: Tensor, *, emulated: bool = False) -> bool:
    """Whether torch._grouped_mm takes these without waiting for the device; emulated: or on a CPU, by a loop."""
    aligned = all(size * w.element_size() % 16 == 0 for size in w.shape[1:]) and len(left) > 0
    if left.device.type == "cpu":
        return aligned and emulated
    if left.dtype != torch.bfloat16 or left.device.type != "cuda" or torch.version.hip is not None:
        return False
    return aligned and torch.cuda.get_device_capability(left.device) >= (9, 0)


def ends(counts_E: Tensor) -> Tensor:
    """The end of each expert's rows, int32, as torch._grouped_mm expects."""
    return counts_E.cumsum(0).to(torch.int32)


@triton.jit(do_not_specialize=["routes"])
def moe_activate(
    z, counts, hidden, routes,
    F: tl.constexpr, GATED: tl.constexpr, E: tl.constexpr, PADDED_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """hidden [R, F] = act(z [R, Z]) of the kept rows; BLOCK_N columns of z a program."""
    experts = tl.arange(0, PADDED_E)
    kept = tl.sum(tl.load(counts + experts, mask=experts < E, other=0))
    Z: tl.constexpr = 2 * F if GATED else F
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N
    columns = column + tl.arange(0, BLOCK_N)
    inside = rows < kept
    mask = inside[:, None] & (columns < Z)[None, :]
    block = tl.load(z + rows[:, None] * Z + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    up_columns(block, hidden, hidden, rows, inside, column, F, GATED, False, True, 1, BLOCK_M, BLOCK_N, False)


@triton.jit(do_not_specialize=["routes"])
def moe_activate_gradient(
    dhidden, z, counts, order, weights, dz, weighted, partial, routes,
    F: tl.constexpr, GATED: tl.constexpr, E: tl.constexpr, PADDED_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dz, weighted and partial as moe_gradient computes them, from dA' = dhidden [R, F]; BLOCK_N columns a program."""
    experts = tl.arange(0, PADDED_E)
    kept = tl.sum(tl.load(counts + experts, mask=experts < E, other=0))
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N
    columns = column + tl.arange(0, BLOCK_N)
    inside = rows < kept
    mask = inside[:, None] & (columns < F)[None, :]
    dA = tl.load(dhidden + rows[:, None] * F + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weights + tl.load(order + rows, mask=inside, other=0), mask=inside, other=0.0)
    sums = gradient_columns(dA, z, dz, weighted, weight, rows, inside, column, F, GATED, 1, BLOCK_M, BLOCK_N, False)
    tl.store(partial + tl.program_id(1).to(tl.int64) * routes + rows, sums, mask=inside)


def activate(z: Tensor, counts_E: Tensor, hidden: Tensor, *, gated: bool) -> None:
    """Writes act(z) [R, F] of the kept rows, and nothing for the other rows."""
    rows, width = z.shape
    with on(z.device):
        moe_activate[(-(-rows // BLOCK_ROWS), -(-width // BLOCK_COLUMNS))](
            *(z, counts_E, hidden, rows), **_constants(hidden.shape[1], gated, len(counts_E)), num_warps=WARPS
        )


def activate_gradient(
    dhidden: Tensor, z: Tensor, counts_E: Tensor, order_R: Tensor, weights_TK: Tensor, dz: Tensor, weighted: Tensor
) -> Tensor:
    """Writes dz and weighted of the kept rows; returns the partial sums of the weights' gradients, float32 [., R]."""
    rows, width = dhidden.shape
    columns = -(-width // BLOCK_COLUMNS)
    partial = torch.empty((columns, rows), dtype=torch.float32, device=z.device)
    with on(z.device):
        moe_activate_gradient[(-(-rows // BLOCK_ROWS), columns)](
            *(dhidden, z, counts_E, order_R, weights_TK, dz, weighted, partial, rows),
            **_constants(width, dz.shape[1] != width, len(counts_E)),
            num_warps=WARPS,
        )
    return partial


def _constants(hidden: int, gated: bool, experts: int) -> dict[str, int | bool]:
    sizes = {"F": hidden, "GATED": gated, "E": experts, "PADDED_E": triton.next_power_of_2(experts)}
    return sizes | {"BLOCK_M": BLOCK_ROWS, "BLOCK_N": BLOCK_COLUMNS}


def builds(arch: str) -> list[Build]:
    """The activations in bfloat16 at T 32768, F 4608, E 8, K 2, where the table may choose torch._grouped_mm."""
    return list(_builds()) if any(arch == known for known, _ in CHOICES) else []


def _builds() -> Iterator[Build]:
    T, _, F, E, K = REFERENCE_SHAPE
    R, own = T * K, f"*{NAMES[torch.bfloat16]}"
    known = dict.fromkeys(("z", "hidden", "dhidden", "dz", "weighted"), own) | {"weights": "*fp32", "partial": "*fp32"}
    known |= {"counts": "*i64", "order": "*i64", "routes": "i32"}
    for gated in (True, False):
        Z = F * (1 + gated)
        for kernel, width, moved in (
            (moe_activate, Z, 2 * R * (Z + F)),
            (moe_activate_gradient, F, 2 * R * (2 * Z + 2 * F)),
        ):
            yield Build(
                name=kernel.fn.__name__,
                kernel=kernel,
                signature={name: known[name] for name in kernel.arg_names if name in known},
                constants=_constants(F, gated, E),
                num_warps=WARPS,
                num_stages=3,
                programs=-(-R // BLOCK_ROWS) * -(-width // BLOCK_COLUMNS),
                flops=10 * R * Z,
                bytes=moved,
            )
