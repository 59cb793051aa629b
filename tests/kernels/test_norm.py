"""The residual sum and its norm on every implementation: against float64, autograd's rules, and bits that stay."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cdrmix import ops
from cdrmix.kernels.norm import reference as reference_norm
from cdrmix.kernels.norm import triton as norm

IMPLEMENTATIONS = ["triton", "cpu"]
NARROW = [torch.bfloat16, torch.float16]
EPS = 1e-5
Tensors = dict[str, Tensor | None]

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
kinds = pytest.mark.parametrize("kind", reference_norm.KINDS)
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def make(
    rows: tuple[int, ...], width: int, *, y: bool = True, bias: bool = True, generator: torch.Generator | None = None
) -> Tensors:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "x": 3 * normal(*rows, width) + 1,
        "y": normal(*rows, width) if y else None,
        "weight": 1 + normal(width),
        "bias": normal(width) if bias else None,
    }


def converted(tensors: Tensors, dtype: torch.dtype, *names: str) -> Tensors:
    return {name: x.to(dtype) if x is not None and (not names or name in names) else x for name, x in tensors.items()}


def given_gradients(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of the sum and of the norm: eighths, which every dtype has."""
    generator = torch.Generator().manual_seed(7)
    first, second = (torch.randint(-16, 17, x.shape, generator=generator) / 8 for _ in range(2))
    return first, second


def run(tensors: Tensors, kind: str, needed: str = "x y weight bias", used: str = "both") -> dict[str, Tensor]:
    """total, normed, and the gradients of the inputs in `needed`; used: both outputs, or total or normed alone."""
    leaves = {name: None if x is None else x.detach() for name, x in tensors.items()}
    wanted = {name: x.requires_grad_() for name, x in leaves.items() if x is not None and name in needed.split()}
    total, normed = ops.add_norm(**leaves, eps=EPS, kind=kind)  # type: ignore[arg-type]
    found = {"total": total.detach(), "normed": normed.detach()}
    chosen = [
        (output, gradient.to(output))
        for name, output, gradient in zip(found, (total, normed), given_gradients(total), strict=True)
        if used in ("both", name) and output.requires_grad
    ]
    gradients = torch.autograd.grad(
        [output for output, _ in chosen], list(wanted.values()), [dy for _, dy in chosen], allow_unused=True
    )
    return found | {f"d{name}": dx for name, dx in zip(wanted, gradients, strict=True) if dx is not None}


def bars(tensors: Tensors, kind: str) -> dict[str, Tensor]:
    """What float32 may be off by, a row: see `test_values_and_gradients_are_near_float64`."""
    wide = {name: None if x is None else x.double() for name, x in tensors.items()}
    x, y, weight, bias = (wide[name] for name in ("x", "y", "weight", "bias"))
    assert x is not None
    assert weight is not None
    width = x.shape[-1]
    total = (x if y is None else x + y).view(-1, width)
    centred = total - total.mean(-1, keepdim=True) if kind == "layernorm" else total
    inverse = (centred.square().mean(-1, keepdim=True) + EPS).rsqrt()
    off = 64 * 2.0**-24 * (1 + total.abs().amax(-1, keepdim=True) * inverse)
    dtotal, dnormed = (z.double().view(-1, width).abs() for z in given_gradients(x))
    largest = weight.abs().max()
    shift = torch.zeros(()) if bias is None else bias.abs().max()
    dx = off * (width**0.5 * inverse * largest * dnormed.amax(-1, keepdim=True) + dtotal.amax(-1, keepdim=True))
    by_row = {"normed": off * (largest + shift), "dx": dx, "dy": dx}
    found = {name: bar.expand(total.shape).view(x.shape) for name, bar in by_row.items()}
    return found | {"dweight": (off * dnormed).sum(0), "dbias": 64 * 2.0**-24 * dnormed.sum(0)}


def check(tensors: Tensors, kind: str) -> None:
    rows = tensors["x"]
    assert rows is not None
    exact, found = run(converted(tensors, torch.float64), kind), run(tensors, kind)
    assert found.keys() == exact.keys()
    y = tensors["y"]
    assert torch.equal(found.pop("total"), rows if y is None else rows + y)
    for name, value in found.items():
        assert value.dtype == torch.float32
        error = (value.double() - exact[name]).abs()
        assert bool((error <= bars(tensors, kind)[name]).all()), f"{name} {list(rows.shape)} {error.max()}"


@implementations
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(0, 19),
    width=st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 300])),
    kind=st.sampled_from(reference_norm.KINDS),
    y=st.booleans(),
    bias=st.booleans(),
)
@settings(phases=[Phase.generate])
def test_values_and_gradients_are_near_float64(
    implementation: str, seed: int, rows: int, width: int, kind: str, y: bool, bias: bool
) -> None:
    """Of a row with deviation s and largest element m, subtracting the mean leaves errors of 2^-24 m, m / s of the
    standardised values, and as much, relatively, of 1 / s; 64 of these for sums of up to 300 terms and some ten
    roundings in a row. dx is their sum with terms of at most sqrt(D) |dnormed weight| / s."""
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CDRMIX_BACKEND", implementation)
        check(make((rows,), width, y=y, bias=bias and kind == "layernorm"), kind)


@implementations
@kinds
def test_many_rows_and_pieces(implementation: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than one piece or program has, in the last of them fewer; and the sums apart, as for wide rows."""
    monkeypatch.setenv("CDRMIX_BACKEND", implementation)
    monkeypatch.setattr(norm, "PROGRAMS", 3)
    check(make((3, 101), 24, bias=kind == "layernorm"), kind)
    monkeypatch.setattr(norm, "SUMMED_WIDTH", 16)
    check(make((3, 101), 70, bias=kind == "layernorm"), kind)


def test_reference_equals_the_formulas() -> None:
    x, y, weight, bias = (torch.randn(3, 5, 7).double() for _ in range(4))
    weight, bias, total = weight[0, 0], bias[0, 0], x + y
    mean = total.sum(-1, keepdim=True) / 7
    deviation = ((total - mean).square().sum(-1, keepdim=True) / 7 + EPS).sqrt()
    options: dict[str, Any] = {"eps": EPS, "dtype": torch.float64}
    found = reference_norm.add_norm(x, y, weight, bias, kind="layernorm", **options)
    torch.testing.assert_close(found, (total, (total - mean) / deviation * weight + bias))
    size = (total.square().sum(-1, keepdim=True) / 7 + EPS).sqrt()
    found = reference_norm.add_norm(x, y, weight, None, kind="rmsnorm", **options)
    torch.testing.assert_close(found, (total, total / size * weight))


@kinds
@pytest.mark.parametrize("y", [True, False])
def test_gradcheck_of_the_reference(kind: str, y: bool) -> None:
    tensors = converted(make((2, 3), 5, y=y, bias=kind == "layernorm"), torch.float64)
    leaves = [x if x is None else x.requires_grad_() for x in tensors.values()]
    assert torch.autograd.gradcheck(lambda *z: ops.add_norm(*z, eps=EPS, kind=kind), leaves)


@implementations
@kinds
@pytest.mark.parametrize("dtype", NARROW)
def test_half_precision_is_computed_in_float32(
    implementation: str, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum has one rounding; norm and gradients are those of that sum, rounded once, by 2^-8 of a value in bfloat16
    and 2^-11 in float16 at most."""
    monkeypatch.setenv("CDRMIX_BACKEND", implementation)
    torch.manual_seed(0)
    tensors = converted(make((3, 5), 48, bias=kind == "layernorm"), dtype)
    x, y = tensors["x"], tensors["y"]
    assert x is not None
    assert y is not None
    found = run(tensors, kind)
    assert torch.equal(found["total"], (x.float() + y.float()).to(dtype))
    rounded = {"x": found["total"].double(), "y": torch.zeros_like(x).double()}
    exact = run(converted(tensors, torch.float64) | rounded, kind)
    for name, value in found.items():
        assert value.dtype == dtype
        bar = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype] * exact[name].abs() + 1e-5
        assert bool(((value.double() - exact[name]).abs() <= bar).all()), name


@implementations
def test_a_float32_stream_beside_narrow_branches(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under autocast: the sum stays float32, the norm and dy are rounded, dx is not."""
    monkeypatch.setenv("CDRMIX_BACKEND", implementation)
    torch.manual_seed(1)
    tensors = converted(make((2, 9), 40), torch.bfloat16, "y")
    y = tensors["y"]
    assert y is not None
    wide = run(tensors | {"y": y.float()}, "layernorm")
    with torch.autocast("cpu", torch.bfloat16):
        total, normed = ops.add_norm(**tensors, kind="layernorm")  # type: ignore[arg-type]
        assert (total.dtype, normed.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(total, wide["total"])
        assert torch.equal(normed, wide["normed"].bfloat16())
        found = run(tensors, "layernorm")
        _, unrounded = ops.add_norm(**tensors, kind="layernorm", dtype=torch.float32)  # type: ignore[arg-type]
        assert torch.equal(unrounded, wide["normed"])
    assert (found["dx"].dtype, found["dy"].dtype, found["dweight"].dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.float32,
    )
    assert torch.equal(found["dy"], found["dx"].bfloat16())


@implementations
@kinds
def test_only_some_inputs_or_outputs(implementation: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", implementation)
    torch.manual_seed(2)
    for y in (True, False):
        tensors = make((4, 3), 33, y=y, bias=kind == "layernorm")
        whole = run(tensors, kind)
        for name, x in tensors.items():
            if x is not None:
                part = run(tensors, kind, name)
                assert part.keys() == {"total", "normed", f"d{name}"}
                assert torch.equal(part[f"d{name}"], whole[f"d{name}"]), name
        total, normed = run(tensors, kind, used="total"), run(tensors, kind, used="normed")
        dtotal, _ = given_gradients(whole["total"])
        assert torch.equal(total["dx"], dtotal)
        assert torch.equal(normed["dweight"], whole["dweight"])
        torch.testing.assert_close(normed["dx"] + dtotal, whole["dx"], rtol=0, atol=2e-6)  # one sum of order 1


@implementations
def test_a_row_has_the_same_bits_wherever_it_stands(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", implementation)
    torch.manual_seed(3)
    tensors = make((11,), 36)
    order = torch.tensor([7, 2, 9])
    whole = ops.add_norm(**tensors, kind="layernorm")  # type: ignore[arg-type]
    rows = {name: x[order] if x is not None and x.ndim == 2 else x for name, x in tensors.items()}
    part = ops.add_norm(**rows, kind="layernorm")  # type: ignore[arg-type]
    assert all(torch.equal(left[order], right) for left, right in zip(whole, part, strict=True))


@kinds
def test_the_number_of_threads_changes_no_bit(kind: str) -> None:
    torch.manual_seed(4)
    tensors = make((2, 700), 128, bias=kind == "layernorm")
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(run(tensors, kind))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(results[0][key], other[key]) for key in other)


@implementations
def test_inputs_that_are_not_contiguous(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", implementation)
    tensors = make((2, 6), 20)
    strided = {name: x if x is None else x.repeat_interleave(2, -1)[..., ::2] for name, x in tensors.items()}
    for left, right in zip(run(tensors, "layernorm").values(), run(strided, "layernorm").values(), strict=True):
        assert torch.equal(left, right)


@implementations
def test_nan_is_passed_on_in_its_row_alone(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", implementation)
    tensors = make((5,), 12)
    x = tensors["x"]
    assert x is not None
    x[2, 7] = torch.nan
    found = run(tensors, "layernorm")
    assert found["normed"].isnan().any(-1).tolist() == [False, False, True, False, False]
    assert found["dx"].isnan().any(-1).tolist() == [False, False, True, False, False]
    assert found["dweight"].isnan().all()


@implementations
def test_activation_checkpointing_gives_the_same_gradients(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", implementation)
    leaves = [x.requires_grad_() for x in make((2, 3), 16).values() if x is not None]

    def layer(*x: Tensor) -> Tensor:
        total, normed = ops.add_norm(*x, kind="layernorm")
        return (total * normed).sum()

    plain = torch.autograd.grad(layer(*leaves), leaves)
    again = torch.autograd.grad(checkpoint(layer, *leaves, use_reentrant=False), leaves)
    assert all(torch.equal(left, right) for left, right in zip(plain, again, strict=True))


def test_torch_compile_passes_through() -> None:
    leaves = [x.requires_grad_() for x in make((2, 3), 16).values() if x is not None]

    def layer(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x, normed = ops.add_norm(x, y, weight, bias, kind="layernorm")
        x, normed = ops.add_norm(x, normed.relu(), weight, kind="rmsnorm")
        return ops.add_norm(x, None, weight, kind="rmsnorm")[1] + normed

    expected = torch.autograd.grad(layer(*leaves).square().sum(), leaves)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*leaves).square().sum(), leaves)
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


def test_torch_library_accepts_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemas, fakes and autograd registrations agree with what the operators do."""
    monkeypatch.setenv("CDRMIX_BACKEND", "cpu")
    opcheck = functools.partial(
        torch.library.opcheck, test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )
    for dtype in (torch.float32, torch.bfloat16):
        x, y, weight, bias = (x if x is None else x.requires_grad_() for x in make((2, 3), 16).values())
        opcheck(torch.ops.cdrmix.add_norm.default, (x, y, weight, bias, EPS, True, dtype))
        opcheck(torch.ops.cdrmix.add_norm.default, (x, None, weight, None, EPS, False, dtype))
        total, normed = torch.randn(2, 3, 16), torch.randn(2, 3, 16, dtype=dtype)
        other = None if dtype == torch.float32 else dtype
        arguments = (normed, total, total.clone(), torch.randn(16), torch.rand(2, 6), True, other, True)
        opcheck(torch.ops.cdrmix.add_norm_backward.default, arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": torch.zeros(2, 4)}, r"add_norm: y must be \[2, 3\]; found \[2, 4\]"),
        ({"weight": torch.zeros(4)}, r"weight must be \[3\]; found \[4\]"),
        ({"bias": torch.zeros(1, 3)}, r"bias must be \[3\]; found \[1, 3\]"),
        ({"x": torch.zeros(2, 0)}, r"x must be \[\.\.\., D\] with D at least 1; found \[2, 0\]"),
        ({"x": None}, "x must be .*found NoneType"),
        ({"weight": torch.zeros(3).double()}, "weight is torch.float64; allowed are .* or float64 for all"),
        ({"y": torch.zeros(2, 3, dtype=torch.int64)}, "y is torch.int64; allowed are bfloat16"),
        ({"y": torch.zeros(2, 3, device="meta")}, "y is on meta, not on cpu"),
        ({"kind": "batchnorm"}, "kind='batchnorm'; choose 'layernorm' or 'rmsnorm'"),
        ({"kind": "rmsnorm"}, "an rmsnorm has no bias"),
        ({"dtype": torch.int64}, "dtype=torch.int64; choose bfloat16, float16, float32 or float64, or None"),
        ({"eps": float("nan")}, "eps must be at least 0; found nan"),
    ],
)
def test_errors_name_the_argument(changes: dict[str, Any], message: str) -> None:
    arguments = {name: torch.zeros(2, 3) for name in "xy"} | {name: torch.zeros(3) for name in ("weight", "bias")}
    with pytest.raises(ValueError, match=message):
        ops.add_norm(**({**arguments, "kind": "layernorm"} | changes))


def test_widths_that_the_gpu_kernels_have_not(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.zeros(1, 16385), torch.zeros(16385)
    ops.add_norm(x, x, weight, kind="rmsnorm")
    monkeypatch.setenv("CDRMIX_BACKEND", "triton")
    with pytest.raises(ValueError, match="x is 16385 wide; the GPU's kernels reach 16384"):
        ops.add_norm(x, x, weight, kind="rmsnorm")


@pytest.mark.gpu
@kinds
@pytest.mark.parametrize("width", [128, 1000, 2048, 6144, 12288])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu(kind: str, width: int, dtype: torch.dtype) -> None:
    """Training's shapes: float32 as above; bfloat16's results are float32's rounded; twice the same bits."""
    tensors = make((2, 1031), width, bias=kind == "layernorm", generator=torch.Generator().manual_seed(width))
    exact = run(converted(tensors, torch.float64), kind)
    here = {name: None if x is None else x.to("cuda", dtype) for name, x in tensors.items()}
    found, again = run(here, kind), run(here, kind)
    assert all(torch.equal(found[name], again[name]) for name in found)
    for name, value in found.items():
        error = (value.double().cpu() - exact[name]).norm() / exact[name].norm()
        assert error < (2e-2 if dtype == torch.bfloat16 else 2e-6), name  # inputs and results rounded by 2^-8 at most
