"""What the SSD scan refuses, how it differentiates and chooses, and that torch.compile passes through it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cdrmix import ops
from cdrmix.kernels.ssd import reference as reference_scan

BACKENDS = ["cpu", "triton", "reference"]


def arguments(dtype: torch.dtype = torch.float32, heads: int = 3, K: int = 8, V: int = 6) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, 5, *shape, generator=generator).to(dtype)

    return {"q": normal(1, K), "k": normal(1, K), "v": normal(heads, V), "log_decay": -normal(heads).abs()}


def starts(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 5, 8)}, r"q must be \[B, T, G, K\], none of them 0; found \[2, 5, 8\]"),
        ({"k": torch.zeros(2, 5, 1, 9)}, r"k is \[2, 5, 1, 9\], but q is \[2, 5, 1, 8\]"),
        ({"v": torch.zeros(2, 4, 3, 6)}, r"v is \[2, 4, 3, 6\].*all but heads and width must agree"),
        ({"log_decay": torch.zeros(2, 5, 1)}, r"log_decay is \[2, 5, 1\]; one a head and token of v: \[2, 5, 3\]"),
        ({name: torch.zeros(2, 5, 2, 8) for name in "qk"}, "v has 3 heads, q and k 2 groups"),
        ({"v": torch.zeros(2, 5, 0, 6)}, "none of them 0"),
        ({"k": torch.zeros(2, 5, 1, 8, dtype=torch.int64)}, "k is torch.int64; allowed are bfloat16"),
        ({"v": torch.zeros(2, 5, 3, 6).bfloat16()}, "v is torch.bfloat16, but q is torch.float32"),
        ({"log_decay": torch.zeros(2, 5, 3).bfloat16()}, "log_decay may be float32 instead"),
        ({"k": torch.zeros(2, 5, 1, 8, device="meta")}, "k is on meta, but q is on cpu"),
        ({"state": torch.zeros(1, 3, 6, 8)}, r"state must be torch.float32 \[N, H, V, K\] = \[2, 3, 6, 8\]"),
        ({"state": torch.zeros(2, 3, 6, 8).bfloat16()}, "found torch.bfloat16"),
        ({"state": torch.zeros(2, 3, 6, 8), "cu_seqlens": starts(0, 2, 5, 10)}, r"= \[3, 3, 6, 8\]"),
        ({"cu_seqlens": torch.tensor([0.0, 10.0])}, "cu_seqlens must be int32 or int64.*found torch.float32"),
        ({"cu_seqlens": starts(0, 5, 9)}, r"ssd_scan: cu_seqlens must .*end with B \* T = 10; found 0 ... 9"),
        ({"cu_seqlens": starts(0, 7, 5, 10)}, "must not decrease; found 7 then 5 at position 2"),
        ({"cu_seqlens": starts(0, 3, 10)}, "every row's start, multiples of T = 5; 5 is not there"),
        ({"q": None}, "q must be a torch.Tensor; found NoneType"),
        ({"cu_seqlens": [0, 5, 10]}, "cu_seqlens must be a torch.Tensor; found list"),
        ({"chunk": "32"}, r"chunk='32'; choose one of \(16, 32, 64\)"),
        ({"exclusive": None}, "exclusive must be True or False; found None"),
        ({"chunk": 48}, r"chunk=48; choose one of \(16, 32, 64\)"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.ssd_scan(**(arguments() | changes))


@pytest.mark.parametrize(
    ("value", "message"), [(0.25, "must be at most 0; its largest value is 0.25"), (torch.nan, "NaN")]
)
def test_values_are_checked_when_debugging(value: float, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = arguments()
    inputs["log_decay"][1, 2, 0] = value
    ops.ssd_scan(**inputs)  # reading values would wait for a GPU: it is not done unasked
    monkeypatch.setenv("CDRMIX_DEBUG", "1")
    with pytest.raises(ValueError, match=message):
        ops.ssd_scan(**inputs)


def test_widths_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = arguments() | {"v": torch.zeros(2, 5, 3, 300)}
    ops.ssd_scan(**inputs)
    monkeypatch.setenv("CDRMIX_BACKEND", "triton")
    with pytest.raises(ValueError, match="key width 8, value width 300; the GPU's kernels have at most 256"):
        ops.ssd_scan(**inputs)


def test_the_step_takes_one_token_and_no_gradient() -> None:
    inputs, state = arguments(), torch.zeros(2, 3, 6, 8)
    with pytest.raises(ValueError, match=r"ssd_scan_step: q must be \[B, G, K\]"):
        ops.ssd_scan_step(*inputs.values(), state)
    token = [x[:, 0].requires_grad_() for x in inputs.values()]
    with pytest.raises(ValueError, match="ssd_scan_step has no gradient"):
        ops.ssd_scan_step(*token, state)
    with pytest.raises(ValueError, match="state must be"), torch.no_grad():
        ops.ssd_scan_step(*token, state[:1])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("exclusive", [False, True])
def test_the_gradients_are_those_of_finite_differences(packed: bool, exclusive: bool) -> None:
    inputs = [x.requires_grad_() for x in arguments(torch.float64, heads=2, K=3, V=2).values()]
    cu_seqlens = starts(0, 3, 5, 10) if packed else None
    state = torch.randn(3 if packed else 2, 2, 2, 3, dtype=torch.float64, requires_grad=True)

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        flags = {"cu_seqlens": cu_seqlens, "exclusive": exclusive, "return_state": True, "chunk": 16}
        y, last = ops.ssd_scan(*tensors[:-1], state=tensors[-1], **flags)
        assert last is not None
        return y, last

    assert torch.autograd.gradcheck(run, (*inputs, state))


@pytest.mark.parametrize("exclusive", [False, True])
def test_the_definition_is_the_formula(exclusive: bool) -> None:
    """y_i = sum over j of e^(decays between) (q_i . k_j) v_j, written out."""
    q, k, v, log_decay = (x[:, :, 0] for x in arguments(torch.float64).values())
    wanted = torch.zeros_like(v)
    for i in range(5):
        for j in range(i if exclusive else i + 1):
            decay = log_decay[:, j + 1 : i if exclusive else i + 1].sum(1).exp()
            wanted[:, i] += (decay * (q[:, i] * k[:, j]).sum(1)).unsqueeze(1) * v[:, j]
    found, _ = reference_scan.ssd_scan_recurrence(
        *(x.unsqueeze(2) for x in (q, k, v)), log_decay.unsqueeze(2), exclusive=exclusive
    )
    torch.testing.assert_close(found.squeeze(2), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_views_and_gradients_of_some_alone(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", backend)
    inputs = arguments()
    wanted, _ = ops.ssd_scan(**inputs)
    views = {name: x.transpose(0, 1).contiguous().transpose(0, 1) for name, x in inputs.items()}
    assert torch.equal(ops.ssd_scan(**views)[0], wanted)
    all_of_them = [x.clone().requires_grad_() for x in inputs.values()]
    y, _ = ops.ssd_scan(*all_of_them)
    gradients = torch.autograd.grad(y.square().sum(), all_of_them)
    for i, name in enumerate(inputs):
        one = inputs | {name: inputs[name].clone().requires_grad_()}
        y, _ = ops.ssd_scan(**one)
        assert torch.equal(torch.autograd.grad(y.square().sum(), one[name])[0], gradients[i])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_beside_wide_decays(backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bar: 2^-6 for bfloat16, whose rounding of y is 2^-9 and of operands as much a product; float16 is finer."""
    monkeypatch.setenv("CDRMIX_BACKEND", backend)
    inputs = {name: x if name == "log_decay" else x.to(dtype) for name, x in arguments().items()}
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    y, last = ops.ssd_scan(**inputs, return_state=True)
    assert last is not None
    assert (y.dtype, last.dtype) == (dtype, torch.float32)
    gradients = torch.autograd.grad(y.float().square().sum(), list(inputs.values()))
    assert [dx.dtype for dx in gradients] == [x.dtype for x in inputs.values()]
    exact, _ = reference_scan.ssd_scan_recurrence(*(x.double() for x in inputs.values()))
    assert ((y.double() - exact).norm() / exact.norm()).item() < 2**-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packed", [False, True])
def test_the_operator_is_registered_as_pytorch_wants_it(
    backend: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schema, fake tensors and autograd registration agree with what the operator does."""
    monkeypatch.setenv("CDRMIX_BACKEND", backend)
    inputs = [x.requires_grad_() for x in arguments().values()]
    cu_seqlens = starts(0, 3, 5, 10) if packed else None
    state = torch.randn(3 if packed else 2, 3, 6, 8, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for save in (False, True):
        call = (*inputs, state, cu_seqlens, None, False, save, True)
        torch.library.opcheck(torch.ops.cdrmix.ssd_scan.default, call, test_utils=checks)
    token = [x.detach()[:, 0].contiguous() for x in inputs]
    torch.library.opcheck(
        torch.ops.cdrmix.ssd_scan_step.default, (*token, torch.zeros(2, 3, 6, 8), False), test_utils=checks
    )


@pytest.mark.parametrize("backend", ["cpu", "reference", pytest.param("triton", marks=pytest.mark.slow)])
def test_compile_passes_through_without_a_break(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", backend)
    inputs = {name: x.requires_grad_() for name, x in arguments().items()}

    def model(cu_seqlens: Tensor, **inputs: Tensor) -> Tensor:
        y, last = ops.ssd_scan(**inputs, cu_seqlens=cu_seqlens, return_state=True)
        assert last is not None
        return (y * 2).square().sum() + last.sum()

    cu_seqlens = starts(0, 3, 5, 10)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for loss in (compiled(cu_seqlens, **inputs), model(cu_seqlens, **inputs)):
        gradients = torch.autograd.grad(loss, list(inputs.values()))
        assert all(bool(dx.isfinite().all()) for dx in gradients)
        torch.testing.assert_close(loss, model(cu_seqlens, **inputs), rtol=0, atol=0)
    torch._dynamo.reset()
