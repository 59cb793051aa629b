"""The router's logits: the kernels and the operator against float64, the bits of rows, and refused arguments."""

from __future__ import annotations

import importlib

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cdrmix import ops
from cdrmix.kernels.common import triton_helpers
from cdrmix.kernels.moe import triton_logits

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
interpreted = pytest.mark.skipif(not triton_helpers.INTERPRETED, reason="TRITON_INTERPRET=0: the kernels need a GPU")
# RMS ratios to float64. Sums of at most 300 products of float32, or on a GPU of three TF32 products each, which keep 21
# bits and whose sums tensor cores cut off instead of rounding.
FLOAT32, TF32X3 = 2e-6, 2e-5


def passes(x: Tensor, weight: Tensor, dlogits: Tensor, autocast: bool = False) -> dict[str, Tensor]:
    x, weight = (each.detach().requires_grad_() for each in (x, weight))
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        logits = ops.router_logits(x, weight)
    dx, dweight = torch.autograd.grad(logits, [x, weight], dlogits.to(logits))
    return {"logits": logits.detach(), "dx": dx, "dweight": dweight}


def make(T: int, D: int, E: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(T + D + E)
    x, weight, dlogits = (torch.randn(*shape, generator=generator) for shape in ((T, D), (E, D), (T, E)))
    return x.to(device, dtype), weight.to(device), dlogits.to(device)


def assert_near(x: Tensor, weight: Tensor, dlogits: Tensor) -> None:
    found = passes(x, weight, dlogits)
    exact = passes(x.double(), weight.double(), dlogits.double())
    assert [each.dtype for each in found.values()] == [torch.float32, x.dtype, torch.float32]
    bars = dict.fromkeys(found, TF32X3 if x.is_cuda else FLOAT32)
    bars["dx"] = max(bars["dx"], torch.finfo(x.dtype).eps / 2)  # its own rounding
    for name, bar in bars.items():
        error = (found[name].double() - exact[name]).norm() / exact[name].norm()
        assert error <= bar, f"{name}: {error:.1e}"


@interpreted
@settings(max_examples=examples(8))
@given(st.integers(1, 70), st.integers(1, 150), st.integers(1, 64), st.sampled_from([torch.float32, torch.float16]))
def test_the_kernels_are_near_float64(T: int, D: int, E: int, dtype: torch.dtype) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CDRMIX_BACKEND", "triton")
        assert_near(*make(T, D, E, dtype, "cpu"))


@interpreted
def test_tokens_of_several_programs_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", "triton")
    assert_near(*make(1100, 40, 3, torch.float32, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(1, 32, 1), (77, 129, 5), (2100, 2048, 8), (1500, 256, 64), (300, 512, 200)])
def test_on_a_gpu(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The last size has more experts than the kernel takes."""
    inputs = make(*sizes, dtype, "cuda")
    assert_near(*inputs)
    found = passes(*inputs)
    assert all(map(torch.equal, found.values(), passes(*inputs).values()))
    order = torch.randperm(sizes[0], generator=torch.Generator().manual_seed(0)).cuda()
    if sizes[2] <= 64:
        assert torch.equal(ops.router_logits(inputs[0][order], inputs[1]), found["logits"][order])


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_autocast_changes_nothing(device: str) -> None:
    inputs = make(9, 32, 4, torch.bfloat16, device)
    plain = passes(*inputs)
    assert all(map(torch.equal, passes(*inputs, autocast=True).values(), plain.values()))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_no_tokens_give_no_logits_and_a_gradient_of_zero(device: str) -> None:
    found = passes(*make(0, 32, 4, torch.bfloat16, device))
    assert found["logits"].shape == (0, 4)
    assert found["dweight"].count_nonzero() == 0


def test_the_operator_knows_how_many_experts_the_kernel_takes() -> None:
    assert importlib.import_module("cdrmix.ops.router_logits").MAX_EXPERTS == triton_logits.MOST_EXPERTS


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x must be \[T, D\] and the weight \[E, D\]; found \[3, 4\] and \[2, 5\]"):
        ops.router_logits(torch.zeros(3, 4), torch.zeros(2, 5))
