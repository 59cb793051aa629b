"""Rotary positions: the kernel against plain PyTorch in float64, its gradient, packed rows, refused shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cdrmix import ops
from cdrmix.kernels.common import triton_helpers

interpreted = pytest.mark.skipif(not triton_helpers.INTERPRETED, reason="TRITON_INTERPRET=0: the kernels need a GPU")
Sizes = tuple[int, int, int, int]


def make(sizes: Sizes, rows: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and dy [B, T, H, N] and the angles' cosine and sine [rows, T, 1, N/2]."""
    generator = torch.Generator().manual_seed(sum(sizes))
    x, dy = torch.randn(2, *sizes, generator=generator).to(device, dtype)
    angles = torch.rand(rows, sizes[1], 1, sizes[3] // 2, generator=generator) * 100
    return x, dy, angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def passes(x: Tensor, dy: Tensor, cosine: Tensor, sine: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = ops.apply_rotary(x, cosine, sine)
    return [y.detach(), *torch.autograd.grad(y, x, dy)]


def assert_near(*tensors: Tensor) -> None:
    found, exact = passes(*tensors), passes(*(each.double() for each in tensors))
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == tensors[0].dtype
        # Two products and a sum in float32, and the result's own rounding, relative to the pair's length.
        bar = 4 * torch.finfo(torch.float32).eps + torch.finfo(one.dtype).eps / 2
        left, right = other.chunk(2, -1)
        assert ((one.double() - other).abs() <= bar * torch.cat([left.hypot(right)] * 2, -1)).all()


@interpreted
@given(st.data())
def test_the_kernel_is_near_float64(data: st.DataObject) -> None:
    batch, length, heads = (data.draw(st.integers(1, most)) for most in (3, 40, 4))
    sizes = batch, length, heads, 2 * data.draw(st.integers(1, 40))
    rows, dtype = data.draw(st.sampled_from([1, batch])), data.draw(st.sampled_from([torch.float32, torch.float16]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CDRMIX_BACKEND", "triton")
        assert_near(*make(sizes, rows, dtype, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 2), (3, 77, 5, 96), (2, 1000, 16, 128)])
def test_on_a_gpu(sizes: Sizes, dtype: torch.dtype) -> None:
    for rows in (1, sizes[0]):
        tensors = make(sizes, rows, dtype, "cuda")
        assert_near(*tensors)
        assert all(map(torch.equal, passes(*tensors), passes(*tensors)))


@interpreted
def test_strided_tensors_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", "triton")
    x, dy, cosine, sine = make((2, 9, 3, 8), 2, torch.float32, "cpu")
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    for one, other in zip(passes(strided, dy, cosine, sine), passes(x, dy, cosine, sine), strict=True):
        assert torch.equal(one, other)


def test_angles_that_do_not_fit_are_refused() -> None:
    message = r"cosine and sine must be \[1 or 2, 5, 1, 4\] with N even; found \[3, 5, 1, 4\] and \[3, 5, 1, 4\]"
    with pytest.raises(ValueError, match=message):
        ops.apply_rotary(torch.zeros(2, 5, 1, 8), *torch.zeros(2, 3, 5, 1, 4))
