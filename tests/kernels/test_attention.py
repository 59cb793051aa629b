"""Attention over documents: against the formula in float64, packed and alone, gradients, memory, bad arguments."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cdrmix import ops
from cdrmix.kernels.attention import reference as reference_attention
from cdrmix.kernels.common.products import set_num_threads

NAMES = ("y", "dq", "dk", "dv")
F32 = torch.finfo(torch.float32).eps


def inputs(
    batch: int, queries: int, keys: int, heads: int, groups: int, width: int, dtype: torch.dtype, seed: int = 0
) -> list[Tensor]:
    """q, k, v and a gradient of the output; numbers that float32 holds, so that float64 computes from the same."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, queries, heads, width), *[(batch, keys, groups, width)] * 2, (batch, queries, heads, width)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def results(tensors: list[Tensor], cu_seqlens: Tensor | None) -> list[Tensor]:
    """The output and the gradients of q, k, v."""
    q, k, v, dy = tensors
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    y = ops.attention(*leaves, cu_seqlens=cu_seqlens)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def bounds(tensors: list[Tensor], cu_seqlens: Tensor | None, eps: float) -> list[Tensor]:
    """Of the error of each of `results`, element by element: sums of absolute values, each term wrong by a factor.

    A term is wrong by a few roundings to eps, by sums of N and of S numbers in float32, and by e to the error of its
    score, a sum of N products. A gradient of a score is p (dy . v - dy . y).
    """
    q, k, v, dy = (x.double().abs() for x in tensors)
    heads, width, keys = q.shape[2], q.shape[3], k.shape[1]
    q64, k64, v64 = (x.double() for x in tensors[:3])
    k64, v64, k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k64, v64, k, v))
    seen = reference_attention.visible(*q.shape[:2], keys, cu_seqlens, q.device).unsqueeze(1)
    scores = torch.einsum("bthn,bshn->bhts", q64, k64) / math.sqrt(width)
    p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    largest = torch.einsum("bthn,bshn->bhts", q, k).amax().item() / math.sqrt(width)
    factor = 8 * eps + F32 * (width + keys + 16 + (width + 2) * largest)
    weighted = torch.einsum("bhts,bshn->bthn", p, v)
    inner = torch.einsum("bthn,bshn->bhts", dy, v) + torch.einsum("bthn,bthn->bht", dy, weighted).unsqueeze(-1)
    of_scores = p * inner / math.sqrt(width)
    dk, dv = torch.einsum("bhts,bthn->bshn", of_scores, q), torch.einsum("bhts,bthn->bshn", p, dy)
    dk, dv = (x.unflatten(2, (tensors[1].shape[2], -1)).sum(3) for x in (dk, dv))
    return [factor * x for x in (weighted, torch.einsum("bhts,bshn->bthn", of_scores, k), dk, dv)]


@st.composite
def cases(draw: Any) -> tuple[tuple[int, ...], Tensor | None, int]:
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 70))
    groups, width = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 5, 8, 16, 33]))
    heads, seed = groups * draw(st.integers(1, 3)), draw(st.integers(0, 99))
    kind = draw(st.sampled_from(["packed", "one a row", "behind a cache"]))
    if kind == "packed":
        inside = draw(st.lists(st.integers(0, batch * length), max_size=8))  # repeated: an empty document
        starts = sorted([*range(0, (batch + 1) * length, length), *inside])
        dtype = draw(st.sampled_from([torch.int32, torch.int64]))
        return (batch, length, length, heads, groups, width), torch.tensor(starts, dtype=dtype), seed
    keys = length + (draw(st.integers(1, 40)) if kind == "behind a cache" else 0)
    return (batch, length, keys, heads, groups, width), None, seed


@given(cases())
def test_float32_is_the_formula_in_float64(case: tuple[tuple[int, ...], Tensor | None, int]) -> None:
    shape, cu_seqlens, seed = case
    tensors = inputs(*shape, torch.float32, seed)  # type: ignore[arg-type]
    found, expected = results(tensors, cu_seqlens), results([x.double() for x in tensors], cu_seqlens)
    for name, got, wanted, most in zip(NAMES, found, expected, bounds(tensors, cu_seqlens, F32), strict=True):
        assert got.dtype == torch.float32
        assert ((got - wanted).abs() <= most).all(), name


def test_the_reference_is_its_sentence() -> None:
    """The formula in loops over queries and keys, and its gradients by central differences."""
    q, k, v, _ = inputs(2, 5, 5, 4, 2, 3, torch.float64)
    cu_seqlens = torch.tensor([0, 3, 5, 10])
    found, document = reference_attention.attention(q, k, v, cu_seqlens), [[0, 0, 0, 1, 1], [2] * 5]
    for b, t, head in itertools.product(range(2), range(5), range(4)):
        seen = [s for s in range(t + 1) if document[b][s] == document[b][t]]
        weights = torch.stack([q[b, t, head] @ k[b, s, head // 2] / math.sqrt(3) for s in seen]).softmax(0)
        expected = sum(weight * v[b, s, head // 2] for weight, s in zip(weights, seen, strict=True))
        torch.testing.assert_close(found[b, t, head], expected, rtol=1e-13, atol=1e-14)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *x: ops.attention(*x, cu_seqlens=cu_seqlens), leaves)


def check_visible(shape: tuple[int, ...], places: list[list[int]], dtype: torch.dtype, device: str, seed: int) -> None:
    """One query a row sees the keys at its places, as if there were no others. Those hold large numbers."""
    q, k, v, _ = (x.to(device) for x in inputs(*shape, dtype, seed))  # type: ignore[arg-type]
    seen = torch.zeros(k.shape[:2], dtype=torch.bool, device=device)
    for row, chosen in enumerate(places):
        seen[row, chosen] = True
    k, v = (torch.where(seen[:, :, None, None], x, 1e4) for x in (k, v))
    found = ops.attention(q, k, v, visible_BS=seen)
    assert found.dtype == dtype
    for row, chosen in enumerate(places):
        alone = [q[row : row + 1], *(x[row : row + 1, sorted(chosen)] for x in (k, v))]
        wanted = reference_attention.attention(*(x.double() for x in alone))
        most, *_ = bounds([*alone, alone[0]], None, torch.finfo(dtype).eps)
        assert ((found[row : row + 1] - wanted).abs() <= most).all()


@given(st.data())
def test_one_query_a_row_sees_the_keys_of_a_mask(data: Any) -> None:
    batch, keys = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    groups, width = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 8, 16, 33]))
    some = st.lists(st.integers(0, keys - 1), min_size=1, unique=True)
    places = data.draw(st.lists(some, min_size=batch, max_size=batch))
    shape = (batch, 1, keys, groups * data.draw(st.integers(1, 3)), groups, width)
    check_visible(shape, places, torch.float32, "cpu", data.draw(st.integers(0, 99)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_the_gpu_one_query_a_row_sees_the_keys_of_a_mask(dtype: torch.dtype) -> None:
    check_visible((3, 1, 77, 4, 2, 64), [[0], [*range(5, 60)], [3, 76]], dtype, "cuda", 1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", [4, 8, 12, 16, 32])
def test_bits_do_not_depend_on_the_number_of_threads(width: int, packed: bool) -> None:
    before, random = torch.get_num_threads(), torch.Generator().manual_seed(0)
    try:
        for tokens in (*range(9, 33, 2), 16, 40):
            leaves = [torch.randn(2, tokens, 4, width, generator=random).requires_grad_() for _ in range(3)]
            dy = torch.randn(2, tokens, 4, width, generator=random)
            starts = torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32) if packed else None
            found = []
            for threads in (1, 2):
                set_num_threads(threads)
                y = ops.attention(*leaves, cu_seqlens=starts)
                found.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
                assert torch.get_num_threads() == threads
            assert all(torch.equal(one, other) for one, other in zip(*found, strict=True)), tokens
    finally:
        set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_document_has_the_same_bits_packed_or_alone(threads: int) -> None:
    """Also with any number of threads, also for gradients of keys, which are sums over blocks of queries."""
    length, starts = 700, [0, 1, 40, 450, 700, 1400, 2100, 2101, 2400, 2799, 2800]
    q, k, v, dy = inputs(4, length, length, 4, 2, 16, torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    packed = results([q, k, v, dy], torch.tensor(starts))
    torch.set_num_threads(1)
    try:
        for start, end in itertools.pairwise(starts):
            alone = results([x.flatten(0, 1)[None, start:end] for x in (q, k, v, dy)], None)
            for name, got, wanted in zip(NAMES, packed, alone, strict=True):
                assert torch.equal(got.flatten(0, 1)[start:end], wanted[0]), (name, start, end)
    finally:
        torch.set_num_threads(before)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(out)
        self.elements = max([self.elements, *(x.numel() for x in leaves if isinstance(x, Tensor))])
        return out


@pytest.mark.parametrize("cu_seqlens", [None, [0, 300, 1024], [0, 1024]])
def test_no_tensor_of_queries_by_keys_is_made(cu_seqlens: list[int] | None) -> None:
    tensors = inputs(1, 1024, 1024, 2, 1, 8, torch.float32)
    with Largest() as largest:
        results(tensors, None if cu_seqlens is None else torch.tensor(cu_seqlens))
    assert largest.elements <= 1024 * 2 * 8
    with Largest() as largest:  # the formula makes one: the measure sees it
        results([x.double() for x in tensors], None)
    assert largest.elements >= 1024 * 1024


def test_autocast_decides_the_dtype_and_bfloat16_is_as_exact_as_its_roundings() -> None:
    tensors = inputs(2, 50, 50, 4, 2, 16, torch.float32)
    tensors = [x.bfloat16().float() for x in tensors]
    cu_seqlens = torch.tensor([0, 20, 50, 100])
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.attention(*tensors[:3], cu_seqlens=cu_seqlens)
    assert y.dtype == torch.bfloat16
    expected = ops.attention(*(x.double() for x in tensors[:3]), cu_seqlens=cu_seqlens)
    # Weights are rounded to bfloat16 before the second product, then the output: 2^-8 relative at most, each.
    assert (y - expected).abs().amax() <= 3 * 2**-8 * tensors[2].abs().amax()


def case(**changes: Any) -> dict[str, Any]:
    q, k, v, _ = inputs(2, 6, 6, 4, 2, 8, torch.float32)
    return {"q": q, "k": k, "v": v, "cu_seqlens": None, "visible_BS": None} | changes


BAD: list[tuple[dict[str, Any], str]] = [
    ({"q": None}, "q must be a torch.Tensor; found NoneType"),
    ({"k": torch.ones(2, 6, 2)}, r"k must be \[B, S, G, N\]"),
    ({"q": torch.ones(2, 0, 4, 8)}, "none of them 0"),
    ({"q": torch.ones(2, 6, 4, 8, dtype=torch.int64)}, "q is torch.int64; allowed"),
    ({"v": torch.ones(2, 6, 2, 8, dtype=torch.float64)}, "float64 goes with float64 only"),
    ({"v": torch.ones(2, 7, 2, 8)}, "they must agree"),
    ({"q": torch.ones(2, 6, 4, 4)}, "rows and width of a head must agree"),
    ({"q": torch.ones(2, 6, 3, 8)}, "q has 3 heads, k and v 2"),
    ({"q": torch.ones(2, 7, 4, 8)}, "q has 7 tokens, but k only 6"),
    ({"q": torch.ones(2, 5, 4, 8), "cu_seqlens": torch.tensor([0, 5, 10])}, "found 5 queries and 6 keys a row"),
    ({"cu_seqlens": torch.tensor([0.0, 12.0])}, "cu_seqlens must be int32 or int64"),
    ({"cu_seqlens": torch.tensor([0, 12])}, "6 is not there"),
    ({"cu_seqlens": torch.tensor([0, 7, 6, 12])}, "must not decrease"),
    ({"cu_seqlens": torch.tensor([0, 6, 11])}, "end with B \\* T = 12"),
    ({"visible_BS": torch.ones(2, 6, dtype=torch.bool)}, "one query a row without cu_seqlens; found 6"),
    ({"q": torch.ones(2, 1, 4, 8), "visible_BS": torch.ones(2, 6)}, r"torch.bool \[2, 6\] on cpu; found torch.float32"),
    ({"q": torch.ones(2, 1, 4, 8), "visible_BS": torch.ones(2, 5, dtype=torch.bool)}, r"found torch.bool \[2, 5\]"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_a_bad_argument_is_named(changes: dict[str, Any], message: str) -> None:
    arguments = case(**changes)
    with pytest.raises(ValueError, match=rf"attention: .*{message}"):
        ops.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


GPU_SHAPES = [(2, 300, 300, 4, 2, 64), (1, 1, 77, 4, 1, 128), (2, 40, 333, 8, 2, 64), (3, 129, 129, 2, 2, 40)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_the_gpu_agrees_with_the_formula_and_repeats_its_bits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.use_deterministic_algorithms(True)  # not warn_only, with which FlashAttention's backward is not repeatable
    eps = torch.finfo(dtype).eps
    batch, queries, keys = shape[:3]
    tensors = [x.cuda() for x in inputs(*shape, dtype)]  # type: ignore[arg-type]
    packings: list[Tensor | None] = [None]
    if queries == keys:
        inside = [1, 20, 21, queries + 5]
        starts = sorted({*range(0, (batch + 1) * queries, queries), *(x for x in inside if x < batch * queries)})
        packings.append(torch.tensor(starts, device="cuda"))
    for cu_seqlens in packings:
        found = results(tensors, cu_seqlens)
        again = results(tensors, cu_seqlens)
        assert all(torch.equal(left, right) for left, right in zip(found, again, strict=True))
        expected = results([x.double() for x in tensors], cu_seqlens)
        for name, got, wanted, most in zip(NAMES, found, expected, bounds(tensors, cu_seqlens, eps), strict=True):
            assert got.dtype == dtype
            assert ((got - wanted).abs() <= most).all(), (name, cu_seqlens)


@pytest.mark.gpu
def test_the_gpu_needs_no_memory_of_queries_by_keys() -> None:
    length = 16384
    tensors = [x.cuda() for x in inputs(1, length, length, 4, 1, 64, torch.bfloat16)]
    cu_seqlens = torch.tensor([0, 5, 9000, length], device="cuda")
    results(tensors, cu_seqlens)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with Largest() as largest:
        results(tensors, cu_seqlens)
    assert largest.elements <= length * 4 * 64
    # Inputs and outputs are of 2 bytes; the backward sums queries' gradients in float32, a share of the SMs each.
    assert torch.cuda.max_memory_allocated() - before < length * length
