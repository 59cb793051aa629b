"""The experts of the mixture in Triton: gathered grouped products, activations in epilogues, combine by gather.

x [T, D], w_up [E, D, Z], w_down [E, F, D], Z = F (relu2) or 2 F (swiglu: column 2 f the gate of hidden f, 2 f + 1 its
up), weights [T, K] float32, R = T K routes, sorted row r of token t = order_R[r] // K and of expert e:
    Z_r = x_t W_up_e,  A_r = act(Z_r),  Y_r = A_r W_down_e,  y_t = sum_j w_tj Y_r(t, j)
Backward, from dy [T, D]:
    dA'_r = dy_t W_down_e^T,  dw_r = <dA'_r, A_r>,  dZ_r = w_r dA'_r act'(Z_r)
    dW_down_e = sum_r (w_r A_r)^T dy_t,  dW_up_e = sum_r x_t^T dZ_r,  dX_r = dZ_r W_up_e^T,  dx_t = sum_j dX_r(t, j)
so Y need not be kept (the algebra of SonicMoE, arXiv 2512.14080). Kept for the backward pass besides x and the indices:
    recompute=False  Z: K Z elements a token.     recompute=True  nothing: Z is computed again, with the same bits.
With swiglu in bfloat16 and x, that is 2 D + 4 K F bytes a token, or 2 D.

Rows from counts_E.sum() on belong to dropped routes: they are never read, and buffers are not written there. An expert
without rows gets gradients of zero. Products are summed in float32. There are no atomics, no tuning at run time, and
the host reads nothing back: the same bits every time.

A persistent product runs one program a multiprocessor, which loops over tiles. This loop is not flattened into the
loop over the depth: with a flattened loop Triton waits for each product of a tile before it issues the next (2,260
cycles instead of 1,330 for a step of 128 x 256 x 64, estimated under Triton 3.6.0 and 3.7.1).

Weights are read through pointers, as gathered rows must be. With tensor descriptors (TMA) for the weights, compiled
for sm_90 with the same tiles, moe_up had as many registers (255) and 0.95 of the instructions, moe_gradient had 1.7
times the instructions, and all three kernels had three times the barriers. TMA also needs rows of multiples of 16
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from cdrmix.kernels.common.triton_helpers import Build, architecture
from cdrmix.kernels.moe.triton_gemm import moe_gradient, moe_rows_gemm, moe_up, moe_weight_gradient, moe_weight_product
from cdrmix.kernels.moe.triton_rows import (
    NAMES,
    REFERENCE_SHAPE,
    Plan,
    combine,
    combine_rows,
    dispatch,
    on,
    plan,
    processors,
    tile_bound,
)

__all__ = ["combine", "dispatch", "experts_backward", "experts_forward", "product_backward", "product_forward"]

ACTIVATIONS = ("relu2", "swiglu")
REFERENCE_PROCESSORS = 132  # multiprocessors of an H100 or H200, for which Builds are stated
FINISH_BLOCK = 256  # rows of a program of moe_weight_gradient


@dataclass(frozen=True)
class Launch:
    """A product's tile, warps a program, stages of its loads, row tiles a group, and pieces of its epilogue.

    persistent: as many programs as there are multiprocessors, each of which takes one tile after another.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 16
    parts: int = 1
    persistent: bool = False


# The kernels' launches by architecture and operand width in bytes. All products over sorted rows of one entry have the
# same block_m, because they share the table of tiles. On sm_90 these are the widest tiles that spill no register. A
# product with gathered rows loads the row numbers ahead, so two or three of its stages hold no tiles. The gradients'
# tiles are smaller: with at most 128 registers a thread, as at the reference shape (10 more at some others), two
# programs share a multiprocessor, and one computes products while the other is in its epilogue.
_SM90_16 = {
    "up": Launch(128, 256, 64, 8, 4, parts=4, persistent=True),
    "rows": Launch(128, 256, 64, 8, 4, persistent=True),
    "rows_transposed": Launch(128, 256, 64, 8, 4, persistent=True),
    "gradient_swiglu": Launch(128, 128, 64, 8, 3, group=8, parts=4),
    "gradient_relu2": Launch(128, 128, 64, 8, 3, group=8, parts=8),
    "weights_left": Launch(128, 256, 64, 8, 6, parts=2),
    "weights_right": Launch(128, 256, 64, 8, 6, parts=2),
}
_SM80_16 = {
    "up": Launch(128, 128, 64, 8, 4),
    "rows": Launch(128, 128, 64, 8, 4),
    "rows_transposed": Launch(128, 128, 64, 8, 4),
    "gradient_swiglu": Launch(128, 128, 64, 8, 4, parts=4),
    "gradient_relu2": Launch(128, 128, 64, 8, 4, parts=4),
    "weights_left": Launch(128, 128, 64, 8, 6, parts=2),
    "weights_right": Launch(128, 128, 64, 8, 6, parts=2),
}
_SM100_16 = _SM90_16 | {"up": Launch(128, 128, 64, 8, 4)}
# 64 KiB of shared memory.
_GFX942_16 = {
    "up": Launch(128, 128, 64, 8, 2),
    "rows": Launch(128, 128, 64, 8, 2),
    "rows_transposed": Launch(128, 128, 64, 8, 2),
    "gradient_swiglu": Launch(128, 128, 64, 8, 2, parts=2),
    "gradient_relu2": Launch(128, 128, 64, 8, 2, parts=2),
    "weights_left": Launch(128, 128, 64, 8, 2, parts=2),
    "weights_right": Launch(128, 128, 64, 8, 2, parts=2),
}
_SM90_32 = {
    "up": Launch(128, 128, 32, 8, 3),
    "rows": Launch(128, 128, 32, 8, 3),
    "rows_transposed": Launch(128, 128, 32, 8, 3),
    "gradient_swiglu": Launch(128, 64, 32, 8, 3, parts=4),
    "gradient_relu2": Launch(128, 64, 32, 8, 3, parts=4),
    "weights_left": Launch(128, 128, 32, 8, 5, parts=2),
    "weights_right": Launch(128, 128, 32, 8, 5, parts=2),
}
_SM80_32 = _SM90_32 | {
    "up": Launch(128, 64, 32, 8, 3),
    "rows": Launch(128, 64, 32, 8, 3),
    "rows_transposed": Launch(128, 64, 32, 8, 3),
}
_SM100_32 = _SM90_32 | {"gradient_swiglu": Launch(128, 64, 32, 8, 3, parts=2)}
_GFX942_32 = {
    "up": Launch(64, 64, 32, 4, 2),
    "rows": Launch(64, 64, 32, 4, 2),
    "rows_transposed": Launch(64, 64, 32, 4, 2),
    "gradient_swiglu": Launch(64, 64, 32, 4, 2, parts=2),
    "gradient_relu2": Launch(64, 64, 32, 4, 2, parts=2),
    "weights_left": Launch(64, 64, 32, 4, 2, parts=2),
    "weights_right": Launch(64, 64, 32, 4, 2, parts=2),
}
LAUNCHES: dict[tuple[str, int], dict[str, Launch]] = {
    ("sm_80", 2): _SM80_16,
    ("sm_90", 2): _SM90_16,
    ("sm_100", 2): _SM100_16,
    ("gfx942", 2): _GFX942_16,
    ("sm_80", 4): _SM80_32,
    ("sm_90", 4): _SM90_32,
    ("sm_100", 4): _SM100_32,
    ("gfx942", 4): _GFX942_32,
}


def launches_of(arch: str, dtype: torch.dtype) -> dict[str, Launch]:
    """The shipped launches."""
    return LAUNCHES[arch, dtype.itemsize]


def gradients_of(arch: str, dtype: torch.dtype) -> list[Launch]:
    launches = launches_of(arch, dtype)
    return [launches["gradient_swiglu"], launches["gradient_relu2"]]


def precision_of(arch: str, dtype: torch.dtype) -> str:
    """How float32 operands are multiplied: by three TF32 products, with errors of 2^-21; gfx942 multiplies float32.

    Narrower operands ignore it.
    """
    return "ieee" if arch == "gfx942" else "tf32x3" if dtype == torch.float32 else "tf32"


def tile_constants(launch: Launch, arch: str, dtype: torch.dtype) -> dict[str, Any]:
    """The compile-time arguments of every product."""
    return {
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "BLOCK_K": launch.block_k,
        "GROUP": launch.group,
        "PRECISION": precision_of(arch, dtype),
    }


class Problem:
    """The sizes of a call, the layout of its rows, and the launches of its kernels."""

    def __init__(
        self, x_TD: Tensor, w_up: Tensor, w_down: Tensor, k: int, order_R: Tensor, counts_E: Tensor, activation: str
    ) -> None:
        self.T, self.D = x_TD.shape
        self.E, self.F, _ = w_down.shape
        self.gated = activation == "swiglu"
        self.Z = w_up.shape[2]
        self.k, self.R = k, self.T * k
        self.dtype, self.device = x_TD.dtype, x_TD.device
        self.arch = architecture(x_TD.device)
        self.launches = launches_of(self.arch, x_TD.dtype)
        self.order_R, self.counts_E = order_R, counts_E
        self.plan: Plan = plan(order_R, counts_E, k, self.launches["up"].block_m)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def launch(self, name: str, kernel: Any, programs: int, arguments: tuple[Any, ...], sizes: dict[str, Any]) -> None:
        launch = self.launches[name]
        with on(self.device):
            kernel[(programs,)](
                *arguments,
                **sizes,
                **tile_constants(launch, self.arch, self.dtype),
                num_warps=launch.num_warps,
                num_stages=launch.num_stages,
            )

    def row_programs(self, name: str, width: int) -> int:
        tiles = self.plan.tiles * -(-width // self.launches[name].block_n)
        return min(tiles, processors(self.device)) if self.launches[name].persistent else tiles

    def up(self, x_TD: Tensor, w_up: Tensor, *, save_z: bool, save_a: bool) -> tuple[Tensor, Tensor]:
        """z [R, Z] and hidden = act(z) [R, F]; one that is not saved may be empty."""
        z, hidden = self.empty(self.R if save_z else 0, self.Z), self.empty(self.R if save_a else 0, self.F)
        arguments = x_TD, w_up, self.plan.tokens_R, self.plan.table, z, hidden, self.plan.tiles
        launch = self.launches["up"]
        sizes = {"D": self.D, "F": self.F, "GATED": self.gated, "SAVE_Z": save_z, "SAVE_A": save_a}
        sizes |= {"PARTS": launch.parts, "PERSISTENT": launch.persistent}
        self.launch("up", moe_up, self.row_programs("up", self.Z), arguments, sizes)
        return z, hidden

    def rows(self, left: Tensor, w: Tensor, *, transposed: bool, zeros: bool = False) -> Tensor:
        """Sorted rows times their expert's matrix; `zeros`: writes zeros to the rows of no expert."""
        width = w.shape[1] if transposed else w.shape[2]
        out = torch.zeros((self.R, width), dtype=self.dtype, device=self.device) if zeros else self.empty(self.R, width)
        name = "rows_transposed" if transposed else "rows"
        arguments = left, w, self.plan.table, out, self.plan.tiles
        sizes = {"DEPTH": left.shape[1], "WIDTH": width, "TRANSPOSED": transposed}
        sizes |= {"PERSISTENT": self.launches[name].persistent}
        self.launch(name, moe_rows_gemm, self.row_programs(name, width), arguments, sizes)
        return out

    def gradient(
        self, dy_TD: Tensor, w_down: Tensor, weights_TK: Tensor, z: Tensor, dz: Tensor, weighted: Tensor
    ) -> Tensor:
        """Writes dz and weighted; returns dweights_TK."""
        name = "gradient_swiglu" if self.gated else "gradient_relu2"
        columns = -(-self.F // self.launches[name].block_n)
        partial = self.empty(columns, self.R, dtype=torch.float32)
        arguments = (
            *(dy_TD, w_down, self.plan.tokens_R, self.plan.table, self.order_R, weights_TK, z, dz, weighted, partial),
            *(self.plan.tiles, self.R),
        )
        sizes = {"D": self.D, "F": self.F, "GATED": self.gated, "PARTS": self.launches[name].parts}
        self.launch(name, moe_gradient, self.plan.tiles * columns, arguments, sizes)
        dweights_TK = self.empty(self.T, self.k, dtype=torch.float32)
        if self.R:
            with on(self.device):
                moe_weight_gradient[(-(-self.R // FINISH_BLOCK),)](
                    *(partial, self.order_R, self.counts_E, dweights_TK, self.R),
                    **(expert_constants(self.E) | {"PARTIALS": len(partial), "BLOCK": FINISH_BLOCK}),
                    num_warps=4,
                )
        return dweights_TK

    def weights(self, left: Tensor, right: Tensor, like: Tensor, total: Tensor | None, *, gather_left: bool) -> Tensor:
        """The gradient of a weight in its dtype; where there is a float32 total, adds it there and returns it empty."""
        name = "weights_left" if gather_left else "weights_right"
        _, M, N = like.shape
        launch = self.launches[name]
        programs = self.E * -(-M // launch.block_m) * -(-N // launch.block_n)
        sizes = {"M": M, "N": N, "GATHER_LEFT": gather_left, "ADD": total is not None, "PARTS": launch.parts}
        out = torch.empty_like(like) if total is None else total
        arguments = left, right, self.plan.tokens_R, self.counts_E, out
        self.launch(name, moe_weight_product, programs, arguments, sizes | expert_constants(self.E))
        return out if total is None else like.new_empty(0)


def expert_constants(experts: int) -> dict[str, Any]:
    return {"E": experts, "PADDED_E": triton.next_power_of_2(experts)}


def experts_forward(
    x_TD: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    weights_TK: Tensor,
    order_R: Tensor,
    counts_E: Tensor,
    *,
    activation: str,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    """y_TD in x's dtype, and z [R, Z], empty with `recompute`. The module's docstring has the shapes and dtypes."""
    x_TD, w_up, w_down, weights_TK = (tensor.contiguous() for tensor in (x_TD, w_up, w_down, weights_TK))
    p = Problem(x_TD, w_up, w_down, weights_TK.shape[1], order_R, counts_E, activation)
    z, hidden = p.up(x_TD, w_up, save_z=not recompute, save_a=True)
    y_RD = p.rows(hidden, w_down, transposed=False)
    return combine_rows(y_RD, p.plan.inverse_R, weights_TK, p.k), z if not recompute else p.empty(0)


def experts_backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    weights_TK: Tensor,
    order_R: Tensor,
    counts_E: Tensor,
    z: Tensor,
    up_sum: Tensor | None = None,
    down_sum: Tensor | None = None,
    *,
    activation: str,
    recompute: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx_TD, dw_up, dw_down in their tensors' dtypes, and dweights_TK float32; z as experts_forward returned it.

    Where a sum is given, float32 and contiguous, the weight's gradient is added to it unrounded, and returned empty.
    """
    dy_TD, x_TD, w_up, w_down, weights_TK = (tensor.contiguous() for tensor in (dy_TD, x_TD, w_up, w_down, weights_TK))
    p = Problem(x_TD, w_up, w_down, weights_TK.shape[1], order_R, counts_E, activation)
    if recompute:
        z, _ = p.up(x_TD, w_up, save_z=True, save_a=False)
    dz, weighted = p.empty(p.R, p.Z), p.empty(p.R, p.F)
    dweights_TK = p.gradient(dy_TD, w_down, weights_TK, z, dz, weighted)
    dw_down = p.weights(weighted, dy_TD, w_down, down_sum, gather_left=False)
    del weighted, z
    dw_up = p.weights(x_TD, dz, w_up, up_sum, gather_left=True)
    dx_RD = p.rows(dz, w_up, transposed=True)
    return combine_rows(dx_RD, p.plan.inverse_R, None, p.k), dw_up, dw_down, dweights_TK


def product_forward(x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor) -> Tensor:
    """Y_r = X_r W_e of sorted rows, [R, F]; zeros from row counts_E.sum() on."""
    p = _rows_alone(x_RD, w_EDF, counts_E)
    return p.rows(x_RD, w_EDF, transposed=False, zeros=True)


def product_backward(
    dy_RF: Tensor, x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor, w_sum: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dX_r = dY_r W_e^T, zeros from row counts_E.sum() on, and dW_e = sum_r X_r^T dY_r; sums as in experts_backward."""
    p = _rows_alone(x_RD, w_EDF, counts_E)
    dx_RD = p.rows(dy_RF, w_EDF, transposed=True, zeros=True)
    return dx_RD, p.weights(x_RD, dy_RF, w_EDF, w_sum, gather_left=False)


def _rows_alone(x_RD: Tensor, w_EDF: Tensor, counts_E: Tensor) -> Problem:
    """A problem whose rows are sorted already: each row is its own token."""
    order_R = torch.arange(len(x_RD), device=x_RD.device)
    return Problem(x_RD, w_EDF, w_EDF.mT, 1, order_R, counts_E, "relu2")


def builds(arch: str) -> list[Build]:
    """Every product for every dtype and activation at T 32768, D 2048, F 4608, E 8, K 2."""
    return list(_builds(arch))


def _builds(arch: str) -> Iterator[Build]:
    for dtype in NAMES:
        for gated in (True, False):
            yield from _products(arch, dtype, gated, *REFERENCE_SHAPE)
    T, _, F, E, K = REFERENCE_SHAPE
    for width in sorted({launch.block_n for dtype in NAMES for launch in gradients_of(arch, dtype)}):
        columns, R = -(-F // width), T * K
        pointers = {"partial": "*fp32", "order": "*i64", "counts": "*i64", "dweights": "*fp32"}
        yield Build(
            name="moe_weight_gradient",
            kernel=moe_weight_gradient,
            signature=pointers | {"routes": "i32"},
            constants=expert_constants(E) | {"PARTIALS": columns, "BLOCK": FINISH_BLOCK},
            num_warps=4,
            num_stages=3,
            programs=-(-R // FINISH_BLOCK),
            flops=columns * R,
            bytes=4 * columns * R + 12 * R,
            trips=(columns,),
        )


def _products(arch: str, dtype: torch.dtype, gated: bool, T: int, D: int, F: int, E: int, K: int) -> Iterator[Build]:
    """The products at a shape, with their costs there if the rows are spread evenly."""
    own, size, launches = NAMES[dtype], dtype.itemsize, launches_of(arch, dtype)
    R, Z = T * K, F * (1 + gated)
    floats = ("x", "w_up", "w_down", "z", "hidden", "left", "w", "out", "dy", "dz", "weighted", "right")
    known = dict.fromkeys(floats, f"*{own}") | {"weights": "*fp32", "partial": "*fp32", "dweights": "*fp32"}
    known |= {"tokens": "*i32", "table": "*i32", "order": "*i64", "counts": "*i64", "row_tiles": "i32", "routes": "i32"}

    def made(name: str, label: str, kernel: Any, sizes: dict[str, Any], columns: int, depth: int, moved: int) -> Build:
        launch = launches[name]
        M = sizes.get("M", 0)
        tiles = (E * -(-M // launch.block_m) if M else tile_bound(R, E, launch.block_m)) * -(-columns // launch.block_n)
        programs = min(tiles, REFERENCE_PROCESSORS) if launch.persistent else tiles
        steps = -(-depth // launch.block_k)
        return Build(
            name=label,
            kernel=kernel,
            signature={argument: known[argument] for argument in kernel.arg_names if argument in known},
            constants=sizes | tile_constants(launch, arch, dtype),
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            programs=programs,
            flops=2 * (E * M if M else R) * columns * depth,
            bytes=moved * size,
            trips=(-(-tiles // programs), steps) if launch.persistent else (steps,),
        )

    common = {"D": D, "F": F, "GATED": gated}
    for save_z, save_a in ((True, True), (False, True), (True, False)) if gated else ((True, True),):
        sizes = common | {"SAVE_Z": save_z, "SAVE_A": save_a}
        sizes |= {"PARTS": launches["up"].parts, "PERSISTENT": launches["up"].persistent}
        yield made("up", "moe_up", moe_up, sizes, Z, D, T * D + E * D * Z + R * (Z * save_z + F * save_a))
    name = "gradient_swiglu" if gated else "gradient_relu2"
    sizes = common | {"PARTS": launches[name].parts}
    yield made(name, "moe_gradient", moe_gradient, sizes, F, D, T * D + E * D * F + R * (2 * Z + F))
    expert = expert_constants(E)
    rows = R // E
    if gated:  # with relu2 they differ only in sizes
        for add in (False, True):
            parts = {"ADD": add, "PARTS": launches["weights_left"].parts} | expert
            known["out"] = "*fp32" if add else f"*{own}"
            total = 8 // size if add else 1  # elements moved for each element of the gradient, in operand widths
            sizes = {"M": D, "N": Z, "GATHER_LEFT": True} | parts
            moved = T * D + R * Z + E * D * Z * total
            yield made("weights_left", "moe_weight_product_up", moe_weight_product, sizes, Z, rows, moved)
            sizes = {"M": F, "N": D, "GATHER_LEFT": False} | parts
            moved = R * F + T * D + E * D * F * total
            yield made("weights_right", "moe_weight_product_down", moe_weight_product, sizes, D, rows, moved)
        known["out"] = f"*{own}"
        sizes = {"DEPTH": Z, "WIDTH": D, "TRANSPOSED": True, "PERSISTENT": launches["rows_transposed"].persistent}
        yield made("rows_transposed", "moe_rows_gemm_dx", moe_rows_gemm, sizes, D, Z, R * (Z + D) + E * D * Z)
        sizes = {"DEPTH": F, "WIDTH": D, "TRANSPOSED": False, "PERSISTENT": launches["rows"].persistent}
        yield made("rows", "moe_rows_gemm", moe_rows_gemm, sizes, D, F, R * (F + D) + E * D * F)
