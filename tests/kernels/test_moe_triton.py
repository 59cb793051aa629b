"""The mixture of experts in Triton: in its interpreter, and on a GPU where there is one, against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from guarded import UNCHANGED, guarded
from torch import Tensor

from cdrmix import ops
from cdrmix.kernels.common import triton_helpers
from cdrmix.kernels.moe import reference as reference_moe
from cdrmix.kernels.moe import triton as moe_experts
from cdrmix.kernels.moe import triton_route as moe_route
from cdrmix.kernels.moe import triton_rows as moe_rows

interpreted = pytest.mark.skipif(not triton_helpers.INTERPRETED, reason="TRITON_INTERPRET=0: the kernels need a GPU")

NAMES = ("y", "dx", "dw_up", "dw_down", "dweights")
# RMS ratios to float64. Float32: sums of at most 300 products, each through at most four products in a row. Bfloat16:
# rounding to nearest is 2^-9 / sqrt(3) = 1.1e-3 by itself, and up to five rounded tensors lie on the way to a result.
FLOAT32, BFLOAT16 = 2e-6, 6e-3


@dataclasses.dataclass
class Case:
    """A call of the experts on one device, and what float64 says of it."""

    x: Tensor
    w_up: Tensor
    w_down: Tensor
    weights: Tensor
    order: Tensor
    counts: Tensor
    dy: Tensor
    activation: str

    def run(self, recompute: bool = False, kernels: Any = moe_experts, sums: bool = False) -> list[Tensor]:
        """y, dx, dw_up, dw_down, dweights; with sums, what is in `self.sums()` after the weights' were added."""
        inputs = self.x, self.w_up, self.w_down, self.weights, self.order, self.counts
        y, z = kernels.experts_forward(*inputs, activation=self.activation, recompute=recompute)
        assert z.shape == ((len(self.order), self.w_up.shape[2]) if not recompute else (0,))
        totals = self.sums() if sums else []
        found = [
            y,
            *kernels.experts_backward(self.dy, *inputs, z, *totals, activation=self.activation, recompute=recompute),
        ]
        if sums:
            assert found[2].numel() == found[3].numel() == 0
            found[2:4] = totals
        return found

    def sums(self) -> list[Tensor]:
        """Gradients of earlier micro-batches of w_up and w_down, normal numbers of float32 at least."""
        generator = torch.Generator().manual_seed(1)
        wide = torch.promote_types(self.x.dtype, torch.float32)
        return [
            torch.randn(w.shape, generator=generator).to(w.device, wide).contiguous() for w in (self.w_up, self.w_down)
        ]

    def exact(self, sums: bool = False) -> list[Tensor]:
        floats = {
            field.name: value.double()
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor) and value.is_floating_point()
        }
        return dataclasses.replace(self, **floats).run(True, reference_moe, sums)


def make(
    T: int,
    D: int,
    F: int,
    E: int,
    k: int,
    activation: str,
    *,
    capacity: int | None = None,
    skew: str = "",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """Normal tensors, z and y of order 1; skew "one": every token to expert 0 first, "empty": none to expert E - 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    logits = normal(T, E)
    if skew == "one":
        logits[:, 0] += 100
    elif skew == "empty":
        logits[:, -1] -= 100
    weights, _, counts, _, order, _, _ = reference_moe.route_forward(logits, k, None, capacity)
    Z = 2 * F if activation == "swiglu" else F
    tensors = (normal(T, D), normal(E, D, Z) / D**0.5, normal(E, F, D) / F**0.5)
    x, w_up, w_down = (tensor.to(device, dtype) for tensor in tensors)
    dy = normal(T, D).to(device, dtype)
    return Case(x, w_up, w_down, weights.to(device), order.to(device), counts.to(device), dy, activation)


def worse(found: list[Tensor], wanted: list[Tensor], bar: float) -> dict[str, float]:
    """The RMS ratios that are not below the bar; zeros have to be met exactly."""
    ratios = {}
    for name, x, y in zip(NAMES, found, wanted, strict=True):
        assert x.shape == y.shape, name
        ratios[name] = ((x.double() - y).norm() / y.norm().clamp(min=1e-30)).item() if y.numel() else 0.0
    return {name: ratio for name, ratio in ratios.items() if not ratio < bar}


def assert_same(left: list[Tensor], right: list[Tensor], names: tuple[str, ...] = NAMES) -> None:
    for name, x, y in zip(names, left, right, strict=True):
        assert torch.equal(x, y), name


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 rows, so that small shapes have several of each kind; the interpreter takes its time by the tile.

    Epilogues are in pieces, and what may be persistent is: as in the widest of the shipped launches.
    """
    for key, launches in moe_experts.LAUNCHES.items():
        tile = {"block_m": 16, "block_n": 64, "block_k": 32, "group": 2}
        small = {
            name: dataclasses.replace(launch, **tile, parts=max(launch.parts, 2), persistent=True)
            for name, launch in launches.items()
        }
        monkeypatch.setitem(moe_experts.LAUNCHES, key, small)


SHAPES = [
    (37, 40, 72, 3, 2, {}),
    (1, 16, 16, 4, 2, {}),
    (33, 5, 3, 3, 1, {}),  # rows that are not aligned
    (40, 24, 40, 3, 2, {"capacity": 18}),
]
LOADS = [  # other tables of tiles, which no activation changes
    (40, 32, 64, 3, 2, {"skew": "empty"}),
    (40, 24, 40, 3, 1, {"skew": "one"}),
    (7, 16, 16, 9, 2, {}),
    (20, 16, 16, 3, 3, {"capacity": 0}),
]
CASES = [*((*shape, "swiglu") for shape in (*SHAPES, *LOADS)), *((*shape, "relu2") for shape in SHAPES)]


@interpreted
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("T", "D", "F", "E", "k", "how", "activation"), CASES)
def test_experts_equal_float64(T: int, D: int, F: int, E: int, k: int, how: dict[str, Any], activation: str) -> None:
    case = make(T, D, F, E, k, activation, **how)
    found = case.run()
    assert all(x.isfinite().all() for x in found)
    assert worse(found, case.exact(), FLOAT32) == {}
    if activation == "swiglu":
        assert_same(case.run(recompute=True), found)
    for gradient in found[2:4]:
        for expert in (case.counts == 0).nonzero():
            assert (gradient[expert] == 0).all()
    added = case.run(sums=True)
    assert_same([*added[:2], added[4]], [*found[:2], found[4]], ("y", "dx", "dweights"))
    assert worse(added, case.exact(sums=True), FLOAT32) == {}
    for start, total in zip(case.sums(), added[2:4], strict=True):
        assert torch.equal(total[case.counts == 0], start[case.counts == 0])


@interpreted
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_shipped_tiles_equal_float64(activation: str) -> None:
    """The interpreter takes sm_90's launches: several tiles of rows and of columns, and sizes of no whole tile."""
    case = make(70, 72, 140, 2, 2, activation)
    assert worse(case.run(recompute=True), case.exact(), FLOAT32) == {}
    assert worse(case.run(sums=True), case.exact(sums=True), FLOAT32) == {}


@interpreted
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_bfloat16_is_near_float64(monkeypatch: pytest.MonkeyPatch, activation: str) -> None:
    """Shipped pieces of the epilogue, and sums in float32 of rounded operands, as on a GPU."""
    launches = moe_experts.LAUNCHES["sm_90", 2]
    small = {name: dataclasses.replace(launch, block_m=32, block_n=64, block_k=64) for name, launch in launches.items()}
    monkeypatch.setitem(moe_experts.LAUNCHES, ("sm_90", 2), small)
    case = make(37, 48, 80, 2, 2, activation, dtype=torch.bfloat16)
    found = case.run()
    assert [x.dtype for x in found] == [torch.bfloat16] * 4 + [torch.float32]
    assert worse(found, case.exact(), BFLOAT16) == {}
    added = case.run(sums=True)
    assert [x.dtype for x in added[2:4]] == [torch.float32] * 2
    assert worse(added, case.exact(sums=True), BFLOAT16) == {}


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_an_expert_without_rows_and_no_tokens_at_all() -> None:
    """A rank of expert parallelism may have no rows: its gradients are zero and overwrite the old contents."""
    case = make(4, 16, 16, 3, 1, "swiglu")
    nothing = torch.zeros(0, 16)
    weights, order = torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64)
    case = dataclasses.replace(
        case, x=nothing, dy=nothing, weights=weights, order=order, counts=torch.zeros_like(case.counts)
    )
    y, dx, dw_up, dw_down, dweights = case.run()
    assert (y.shape, dx.shape, dweights.shape) == ((0, 16), (0, 16), (0, 1))
    assert (dw_up == 0).all()
    assert (dw_down == 0).all()


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_dropped_rows_do_not_leak() -> None:
    """NaN in z's rows after the kept ones, and in tokens all of whose routes were dropped."""
    case = make(40, 16, 16, 2, 1, "swiglu", capacity=10)
    inputs = case.x, case.w_up, case.w_down, case.weights, case.order, case.counts
    wanted = case.run()
    kept = int(case.counts.sum())
    dropped = case.order[kept:]
    case.x[dropped] = case.dy[dropped] = float("nan")
    y, z = moe_experts.experts_forward(*inputs, activation="swiglu", recompute=False)
    z[kept:] = float("nan")
    found = moe_experts.experts_backward(case.dy, *inputs, z, activation="swiglu", recompute=False)
    assert_same([y, *found], wanted)
    assert (found[-1].view(-1)[dropped] == 0).all()
    assert (y[dropped] == 0).all()


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_nothing_is_written_beside_the_results() -> None:
    case = make(21, 24, 20, 3, 2, "swiglu", capacity=13)
    logits = torch.randn(21, 3, generator=torch.Generator().manual_seed(1))
    chosen = torch.arange(42).view(21, 2) % 3
    calls = (
        case.run,
        lambda: case.run(sums=True),
        lambda: [*moe_route.route_forward(logits, 2, None, 13)],
        lambda: [moe_route.route_backward(case.weights, None, None, logits, chosen, case.counts, 2)],
        lambda: [moe_rows.dispatch(case.x, case.order, case.counts, 2)],
        lambda: [moe_rows.combine(torch.ones(42, 24), case.order, case.counts, 2)],
    )
    wanted = [call() for call in calls]
    with guarded(UNCHANGED) as memory:
        for call, results in zip(calls, wanted, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(call(), results, strict=True))
    assert len(memory) > 25


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_tokens_in_another_order_have_their_bits() -> None:
    """Integers, so that the interpreter's products, which BLAS sums in an order of its own, are exact."""
    case = make(37, 24, 20, 3, 2, "relu2")
    case = dataclasses.replace(
        case, **{name: getattr(case, name).mul(2).round() for name in ("x", "w_up", "w_down", "weights", "dy")}
    )
    experts = torch.zeros(74, dtype=torch.int64)
    experts[case.order] = torch.repeat_interleave(torch.arange(3), case.counts)
    mixed = torch.randperm(37, generator=torch.Generator().manual_seed(1))
    rows = {name: getattr(case, name)[mixed] for name in ("x", "dy", "weights")}
    order = experts.view(37, 2)[mixed].view(-1).argsort(stable=True)
    y, dx, dw_up, dw_down, dweights = case.run()
    assert_same(
        dataclasses.replace(case, order=order, **rows).run(), [y[mixed], dx[mixed], dw_up, dw_down, dweights[mixed]]
    )


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_repeats_have_the_same_bits() -> None:
    case = make(19, 16, 16, 3, 2, "swiglu")
    wanted = case.run()
    for _ in range(2):  # the interpreter is numpy in one thread; five on a GPU
        assert_same(case.run(), wanted)


@interpreted
@pytest.mark.parametrize("capacity", [None, 9])
@pytest.mark.parametrize("D", [5, 24])
def test_dispatch_and_combine_equal_the_reference(D: int, capacity: int | None) -> None:
    case = make(21, D, 4, 3, 2, "relu2", capacity=capacity)
    how = case.order, case.counts, 2
    rows = moe_rows.dispatch(case.x, *how)
    assert torch.equal(rows, reference_moe.dispatch(case.x, *how))
    rows[int(case.counts.sum()) :] = float("nan")  # nobody's: not added
    back = moe_rows.combine(rows, *how)
    assert torch.equal(back, reference_moe.combine(rows, *how))
    if capacity is None:
        assert torch.equal(back, 2 * case.x)


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_the_operator_leads_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits to loss and back through the operators, on these kernels in float32 and on the reference in float64."""
    case = make(21, 16, 24, 3, 2, "swiglu")
    logits = torch.randn(21, 3, generator=torch.Generator().manual_seed(1))
    monkeypatch.setenv("CDRMIX_BACKEND", "triton")
    called: list[str] = []
    for module, name in (
        (moe_route, "route_forward"),
        (moe_route, "route_backward"),
        (moe_experts, "experts_backward"),
    ):
        whole = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, f=whole, n=name, **k: called.append(n) or f(*a, **k))
    gradients = []
    for dtype in (torch.float32, torch.float64):
        inputs = [x.to(dtype).requires_grad_() for x in (logits, case.x, case.w_up, case.w_down)]
        routing = ops.route_topk(inputs[0], 2, capacity=12)
        y = ops.moe_experts(*inputs[1:], routing, activation="swiglu")
        loss = (y * case.dy).sum() + routing.load_balance + routing.z_loss
        gradients.append([y.detach(), *torch.autograd.grad(loss, inputs)])
    assert worse(gradients[0], gradients[1], FLOAT32) == {}
    assert sorted(called) == ["experts_backward", "route_backward", "route_forward"]


@pytest.mark.parametrize("block_m", [16, 128])
@interpreted
def test_the_table_of_tiles_against_a_loop(block_m: int) -> None:
    for counts in ([0, 300, 1, 0, 16], [0, 0], [128], [5] * 100):
        rows, wanted = 0, []
        for expert, count in enumerate(counts):
            wanted += [[expert, rows + first, rows + min(first + block_m, count)] for first in range(0, count, block_m)]
            rows += count
        order = torch.randperm(rows + 3, generator=torch.Generator().manual_seed(0))  # three are dropped
        plan = moe_rows.plan(order, torch.tensor(counts), 1, block_m)
        assert plan.tiles == moe_rows.tile_bound(rows + 3, len(counts), block_m)
        *table, (used, _, _) = plan.table.tolist()
        assert [tile for tile in table if tile[1] < tile[2]] == table[:used] == wanted
        assert torch.equal(plan.tokens_R.long(), order)
        assert torch.equal(plan.inverse_R[order], torch.cat([torch.arange(rows), torch.full((3,), -1)]).int())


@pytest.mark.parametrize(("arch", "size"), list(moe_experts.LAUNCHES))
def test_products_over_rows_share_their_tiles(arch: str, size: int) -> None:
    launches = moe_experts.LAUNCHES[arch, size]
    assert len({launches[name].block_m for name in launches if "weights" not in name}) == 1


@pytest.fixture
def exact_products() -> Iterator[None]:
    """Float64 needs nothing; float32 products of PyTorch would take TF32 where a user allowed it."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


GPU_SHAPES = [
    (1000, 512, 384, 8, 2, {}),
    (777, 264, 200, 5, 2, {"capacity": 300}),
    (1, 256, 256, 8, 2, {}),
    (513, 256, 1408, 16, 2, {"skew": "empty"}),
    (300, 51, 33, 4, 1, {"skew": "one"}),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize(("T", "D", "F", "E", "k", "how"), GPU_SHAPES)
def test_experts_on_a_gpu(
    T: int, D: int, F: int, E: int, k: int, how: dict[str, Any], activation: str, dtype: torch.dtype
) -> None:
    """Float32 by three TF32 products, whose sums tensor cores cut off instead of rounding: 64 steps of 2^-24."""
    case = make(T, D, F, E, k, activation, dtype=dtype, device="cuda", **how)
    found = case.run()
    bar = {torch.bfloat16: BFLOAT16, torch.float16: BFLOAT16 / 8, torch.float32: 8 * FLOAT32}[dtype]
    # One token has two weights: no mean over many rounding errors. The terms of their gradients have 3.3 times the norm
    # of the sums, computed for relu2 and seed 0, and so has the error.
    bars = dict.fromkeys(NAMES, bar) | ({"dweights": 3.3 * bar} if T == 1 else {})

    def too_far(found: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
        return {name: ratio for name, ratio in worse(found, exact, bar).items() if not ratio < bars[name]}

    assert too_far(found, case.exact()) == {}
    assert_same(case.run(recompute=True), found)
    added = case.run(sums=True)
    assert too_far(added, case.exact(sums=True)) == {}
    for _ in range(5):
        assert_same(case.run(), found)
        assert_same(case.run(sums=True), added)


@pytest.mark.gpu
def test_tokens_in_another_order_have_their_bits_on_a_gpu() -> None:
    """A row's bits do not depend on its place in a tile: y and dx of permuted tokens are permuted."""
    case = make(1000, 256, 256, 8, 2, "swiglu", dtype=torch.bfloat16, device="cuda")
    experts = torch.zeros_like(case.order)
    experts[case.order] = torch.repeat_interleave(torch.arange(8, device="cuda"), case.counts)
    mixed = torch.randperm(1000, generator=torch.Generator().manual_seed(1)).cuda()
    rows = {name: getattr(case, name)[mixed] for name in ("x", "dy", "weights")}
    order = experts.view(1000, 2)[mixed].view(-1).argsort(stable=True)
    found, wanted = dataclasses.replace(case, order=order, **rows).run(), case.run()
    for i in (0, 1, 4):
        assert torch.equal(found[i], wanted[i][mixed]), NAMES[i]


@pytest.mark.gpu
def test_offsets_beyond_int32() -> None:
    """R Z and E D Z of more than 2^31 elements: the last rows and the last expert, against float64."""
    T, D, F, E = 36000, 64, 32768, 520
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GB")
    generator = torch.Generator("cuda").manual_seed(0)
    w_up = torch.randn(E, D, 2 * F, generator=generator, device="cuda", dtype=torch.bfloat16) / 8
    w_down = torch.randn(E, F, D, generator=generator, device="cuda", dtype=torch.bfloat16) / 181
    x = torch.randn(T, D, generator=generator, device="cuda", dtype=torch.bfloat16)
    counts = torch.zeros(E, dtype=torch.int64, device="cuda")
    counts[0], counts[-1] = T - 8, 8
    order, weights = torch.arange(T, device="cuda"), torch.ones(T, 1, device="cuda")
    y, z = moe_experts.experts_forward(x, w_up, w_down, weights, order, counts, activation="swiglu", recompute=False)
    assert w_up.numel() > 2**31
    assert z.numel() > 2**31
    right = x[-8:].double() @ w_up[-1].double()
    assert ((z[-8:].double() - right).norm() / right.norm()) < BFLOAT16
    hidden = torch.nn.functional.silu(right[:, 0::2]) * right[:, 1::2]
    right = hidden @ w_down[-1].double()
    assert ((y[-8:].double() - right).norm() / right.norm()) < BFLOAT16
