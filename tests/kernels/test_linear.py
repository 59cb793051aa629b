"""The projections' product: PyTorch's own bits without an engine, float32 sums of gradients and no casts with one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cdrmix import ops
from cdrmix.kernels.common import products
from cdrmix.ops.weights import attach

BF16 = torch.bfloat16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EPS = 2.0**-24  # float32's unit roundoff

shapes = st.tuples(st.integers(0, 33), st.integers(1, 40), st.integers(1, 40))


class Passed(NamedTuple):
    y: Tensor
    dx: Tensor
    dweight: Tensor


def draw(*shape: int, seed: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def make_weight(outputs: int, inputs: int, inputs_first: bool, device: str = "cpu") -> nn.Parameter:
    weight = draw(outputs, inputs, seed=1, device=device)
    return nn.Parameter(weight.mT.contiguous() if inputs_first else weight)


def run(weight: nn.Parameter, x: Tensor, dy: Tensor, inputs_first: bool, dtype: torch.dtype | None = BF16) -> Passed:
    """One micro-batch under autocast; dweight is the whole of `.grad` after it."""
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, dtype, enabled=dtype is not None):
        y = ops.linear(x, weight, inputs_first=inputs_first)
    y.backward(dy.to(y.dtype))
    assert x.grad is not None
    assert weight.grad is not None
    return Passed(y.detach(), x.grad, weight.grad)


@given(shapes, st.booleans())
def test_without_an_engine_it_is_pytorchs_own_to_the_bit(sizes: tuple[int, int, int], inputs_first: bool) -> None:
    """Runs with `multiply_on_one_thread` off, even if other tests of this process switched it on."""
    tokens, inputs, outputs = sizes
    x, dy = draw(tokens, inputs, seed=2), draw(tokens, outputs, seed=3)
    for dtype in (None, BF16):
        with patch.object(products._here, "one_thread", False, create=True):
            found = run(make_weight(outputs, inputs, inputs_first), x, dy, inputs_first, dtype)
        weight, leaf = make_weight(outputs, inputs, inputs_first), x.clone().requires_grad_()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            y = leaf @ weight if inputs_first else functional.linear(leaf, weight)
        y.backward(dy.to(y.dtype))
        for one, other in zip(found, (y.detach(), leaf.grad, weight.grad), strict=True):
            assert torch.equal(one, other)


def test_functional_gradients_of_products_with_the_same_bits_for_any_number_of_threads() -> None:
    """torch.func, first and second derivatives. In a thread of its own, since `multiply_on_one_thread` lasts."""
    x, weight = draw(40, 24, seed=1), draw(20, 24, seed=2)

    def curvature(linear: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        slope = torch.func.grad(lambda weight: linear(x, weight).square().sum())
        return torch.func.grad(lambda weight: slope(weight).square().sum())(weight)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(products.multiply_on_one_thread).result()
        found, expected = (thread.submit(curvature, linear).result() for linear in (ops.linear, functional.linear))
    # Three products in a row, of sums of up to 40: each errs by 40 roundings of its absolute sum at most.
    torch.testing.assert_close(found, expected, rtol=3 * 40 * EPS, atol=3 * 40 * EPS * expected.abs().max().item())


def check_against_float64(
    sizes: tuple[int, int, int], inputs_first: bool, device: str, dtype: torch.dtype = BF16
) -> None:
    tokens, inputs, outputs = sizes
    weight = make_weight(outputs, inputs, inputs_first, device)
    attach([weight], dtype, add_gradients=True)
    plain = make_weight(outputs, inputs, inputs_first, device)
    exact, largest = torch.zeros_like(weight, dtype=torch.float64), torch.zeros_like(weight, dtype=torch.float64)
    for seed in (2, 4):  # micro-batches
        x, dy = (
            draw(1, tokens, inputs, seed=seed, device=device),
            draw(1, tokens, outputs, seed=seed + 1, device=device),
        )
        found, autocast = run(weight, x, dy, inputs_first, dtype), run(plain, x, dy, inputs_first, dtype)
        assert torch.equal(found.y, autocast.y), "the copy is the weight that autocast would have cast"
        assert torch.equal(found.dx, autocast.dx)
        left, right = (side.squeeze(0).to(dtype).double() for side in ((x, dy) if inputs_first else (dy, x)))
        exact += left.mT @ right
        largest += left.abs().mT @ right.abs()
        # Factors of 8 or 11 bits have exact products in float32; adding them up rounds once per term, in any order.
        bar = (2 * tokens + 2) * EPS * largest
        assert ((found.dweight.double() - exact).abs() <= bar).all()


@given(shapes, st.booleans())
def test_weight_gradients_are_added_up_in_float32(sizes: tuple[int, int, int], inputs_first: bool) -> None:
    check_against_float64(sizes, inputs_first, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("sizes", [(0, 8, 8), (1, 1, 1), (33, 40, 24), (300, 130, 66), (1024, 2048, 64)])
def test_weight_gradients_are_added_up_in_float32_on_a_gpu(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    for inputs_first in (False, True):
        check_against_float64(sizes, inputs_first, "cuda", dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_every_time_and_with_activation_checkpointing(device: str) -> None:
    x, dy = draw(70, 24, seed=2, device=device), draw(70, 40, seed=3, device=device)
    found = []
    for checkpointed in (False, False, True):
        weight = make_weight(40, 24, False, device)
        attach([weight], BF16, add_gradients=True)
        for _ in range(2):
            leaf = x.clone().requires_grad_()
            with torch.autocast(device, BF16):
                product = lambda x, weight=weight: ops.linear(x.sin(), weight)  # noqa: E731
                y = checkpoint(product, leaf, use_reentrant=False) if checkpointed else product(leaf)
            y.backward(dy.to(BF16))
        found.append((leaf.grad, weight.grad))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_a_copy_alone_leaves_the_gradient_to_autograd() -> None:
    x, dy = draw(20, 24, seed=2), draw(20, 40, seed=3)
    weight, hooked = make_weight(40, 24, False), []
    attach([weight], BF16, add_gradients=False)
    weight.register_post_accumulate_grad_hook(lambda parameter: hooked.append(parameter.grad is not None))
    found, plain = run(weight, x, dy, False), run(make_weight(40, 24, False), x, dy, False)
    assert hooked == [True]
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


def test_what_needs_no_gradient_gets_none() -> None:
    weight = make_weight(40, 24, False)
    attach([weight], BF16, add_gradients=True)
    with torch.autocast("cpu", BF16):
        ops.linear(draw(3, 24, seed=2), weight).sum().backward()
    assert weight.grad is not None
    weight.grad = None
    weight.requires_grad_(False)
    x = draw(3, 24, seed=2).requires_grad_()
    with torch.autocast("cpu", BF16):
        ops.linear(x, weight).sum().backward()
    assert weight.grad is None
    assert x.grad is not None
    # Float32 products, as outside of autocast, know no copy.
    assert torch.equal(ops.linear(x, weight), functional.linear(x, weight))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks for it
def test_torch_compile_leaves_the_product_as_it_is() -> None:
    x, dy = draw(20, 24, seed=2), draw(20, 40, seed=3)

    def block(x: Tensor, weight: Tensor) -> Tensor:
        return ops.linear(x.sin(), weight).cos()

    found = []
    for compiled in (False, True):
        weight, leaf = make_weight(40, 24, False), x.clone().requires_grad_()
        attach([weight], BF16, add_gradients=True)
        function = torch.compile(block, backend="aot_eager") if compiled else block
        with torch.autocast("cpu", BF16):
            y = function(leaf, weight)
        with Sizes(40 * 24) as sizes:
            y.backward(dy.to(BF16))
        assert sizes.found == ["aten.zeros_like.default"], "of the first micro-batch's sum"
        found.append((y, leaf.grad, weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    with torch.autocast("cpu", BF16), pytest.raises(torch._dynamo.exc.Unsupported, match="not in a graph"):
        torch.compile(block, fullgraph=True, backend="aot_eager")(x, weight)
    # In float32 there is nothing to use, and the product is part of the graph.
    y = torch.compile(block, fullgraph=True, backend="aot_eager")(x, weight)
    assert torch.equal(y, block(x, weight))


class Sizes(TorchDispatchMode):
    """The operators, but products, that read or write float32 tensors of a size."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.found = numel, list[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, made) if isinstance(x, Tensor)]
        moves = not func.is_view and "detach" not in str(func) and "addmm" not in str(func)
        if moves and any(x.numel() == self.numel and x.dtype == torch.float32 for x in tensors):
            self.found.append(str(func))
        return made


def test_nothing_of_the_weights_size_moves_in_a_second_micro_batch() -> None:
    x, dy = draw(20, 24, seed=2), draw(20, 40, seed=3)
    counts = []
    for attached in (True, False):
        weight = make_weight(40, 24, False)
        if attached:
            attach([weight], BF16, add_gradients=True)
        run(weight, x, dy, False)
        with Sizes(40 * 24) as sizes:
            run(weight, x, dy, False)
        counts.append(sizes.found)
    assert counts[0] == []
    assert sorted(counts[1]) == ["aten._to_copy.default"] * 2 + ["aten.add_.Tensor"]
