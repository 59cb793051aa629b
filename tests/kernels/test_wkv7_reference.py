"""The chunked RWKV-7 recurrence against its token-by-token definition, in float64, forward and every gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cdrmix import ops
from cdrmix.kernels.rwkv7 import reference

# Both sides are float64 sums over at most 70 tokens of products near 1: 1e-11 is 5e4 eps, room for the
# triangular inverse and the exp(g) exp(-g) factors (at most e^10 apart in a chunk of 32), and 1e-9 of any real error.
CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def inputs(
    seed: int, batch: int, length: int, heads: int, key_width: int, value_width: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """r, log_w, k, v, a, b as RWKV-7 makes them: a unit removal key, decay above exp(-0.6065)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(width: int) -> Tensor:
        return torch.randn(batch, length, heads, width, generator=generator, dtype=dtype)

    removal = torch.nn.functional.normalize(normal(key_width), dim=-1)
    rate = torch.sigmoid(normal(key_width))
    log_w = -0.6065 * torch.sigmoid(normal(key_width))
    tensors = [normal(key_width), log_w, normal(key_width), normal(value_width), -removal, removal * rate]
    return [tensor.requires_grad_() for tensor in tensors]


def packed_by_hand(tensors: list[Tensor], cu_seqlens: list[int]) -> Tensor:
    """The definition run on each document apart, laid side by side again."""
    batch, length = tensors[0].shape[:2]
    flat = [tensor.reshape(1, batch * length, *tensor.shape[2:]) for tensor in tensors]
    pieces = [
        reference.wkv7_recurrence(*[tensor[:, start:end] for tensor in flat])[0]
        for start, end in itertools.pairwise(cu_seqlens)
    ]
    return torch.cat(pieces, 1).view(batch, length, *pieces[0].shape[2:])


@settings(max_examples=examples(8))
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 2),
    length=st.integers(1, 70),
    heads=st.integers(1, 2),
    key_width=st.sampled_from([4, 6]),
    value_width=st.sampled_from([3, 6]),
    chunk=st.sampled_from([8, 16, 32]),
)
def test_equals_the_definition(
    seed: int, batch: int, length: int, heads: int, key_width: int, value_width: int, chunk: int
) -> None:
    tensors = inputs(seed, batch, length, heads, key_width, value_width)
    state = torch.randn(batch, heads, value_width, key_width, dtype=torch.float64, requires_grad=True)
    expected, expected_last = reference.wkv7_recurrence(*tensors, state)
    found, found_last = reference.wkv7(*tensors, state=state, chunk=chunk)
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(found_last, expected_last, **CLOSE)
    weights = torch.randn_like(expected), torch.randn_like(expected_last)
    wanted = torch.autograd.grad((expected * weights[0]).sum() + (expected_last * weights[1]).sum(), [*tensors, state])
    got = torch.autograd.grad((found * weights[0]).sum() + (found_last * weights[1]).sum(), [*tensors, state])
    for left, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(left, right, **CLOSE)


@settings(max_examples=examples(8))
@given(seed=st.integers(0, 10**6), length=st.integers(1, 40), data=st.data())
def test_packed_documents_equal_documents_apart(seed: int, length: int, data: st.DataObject) -> None:
    batch = 2
    inner = data.draw(st.sets(st.integers(1, batch * length - 1), max_size=6)) if batch * length > 1 else set()
    cu_seqlens = sorted({0, length, batch * length} | inner)
    tensors = inputs(seed, batch, length, 2, 4, 5)
    expected = packed_by_hand(tensors, cu_seqlens)
    found, _ = reference.wkv7(*tensors, cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32), chunk=8)
    torch.testing.assert_close(found, expected, **CLOSE)
    weight = torch.randn_like(expected)
    for left, right in zip(
        torch.autograd.grad((found * weight).sum(), tensors),
        torch.autograd.grad((expected * weight).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(left, right, **CLOSE)


def test_every_document_has_its_own_state() -> None:
    tensors = inputs(3, 1, 20, 1, 4, 4)
    state = torch.randn(3, 1, 4, 4, dtype=torch.float64)
    found, last = reference.wkv7(*tensors, state=state, cu_seqlens=torch.tensor([0, 9, 9, 20]), chunk=8)
    assert last is not None
    head, first = reference.wkv7_recurrence(*[tensor[:, :9] for tensor in tensors], state[:1])
    tail, third = reference.wkv7_recurrence(*[tensor[:, 9:] for tensor in tensors], state[2:])
    torch.testing.assert_close(found, torch.cat([head, tail], 1), **CLOSE)
    torch.testing.assert_close(last, torch.cat([first, state[1:2], third]), **CLOSE)


def test_two_calls_with_the_state_between_equal_one() -> None:
    tensors = inputs(4, 2, 45, 2, 6, 3)
    whole, last = reference.wkv7(*tensors)
    first, between = reference.wkv7(*[tensor[:, :19] for tensor in tensors])
    second, end = reference.wkv7(*[tensor[:, 19:] for tensor in tensors], state=between)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, **CLOSE)
    torch.testing.assert_close(end, last, **CLOSE)


def test_gradcheck_of_the_definition_and_of_the_chunks() -> None:
    tensors = inputs(5, 1, 11, 1, 3, 2)
    state = torch.randn(1, 1, 2, 3, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 4, 11])
    assert torch.autograd.gradcheck(reference.wkv7_recurrence, [*tensors, state])

    state = torch.randn(2, 1, 2, 3, dtype=torch.float64, requires_grad=True)

    def chunked(*arguments: Tensor) -> tuple[Tensor, Tensor | None]:
        *most, carried = arguments
        return reference.wkv7(*most, state=carried, cu_seqlens=cu_seqlens, chunk=8)

    assert torch.autograd.gradcheck(chunked, [*tensors, state])


def test_the_future_cannot_alter_the_past() -> None:
    tensors = inputs(6, 1, 33, 2, 4, 4)
    before, _ = reference.wkv7(*tensors)
    changed = [tensor.clone() for tensor in tensors]
    for tensor in changed:
        tensor.data[:, 20:] *= 0.5
    after, _ = reference.wkv7(*changed)
    # Not bit for bit: the exponents are centred on the chunk's middle, which the future decay moves.
    torch.testing.assert_close(before[:, :20], after[:, :20], **CLOSE)
    assert (before[:, 20:] - after[:, 20:]).abs().max() > 0.1


def test_float32_gradients_hold_where_decay_is_pinned_at_its_bound() -> None:
    """The log-decay gradient is the ill-conditioned one; the prefix sums keep it as good as the others.

    Bar: 64 eps sqrt(T) of the largest gradient, for T = 128 sums of rounded float32 products.
    """
    exact = inputs(7, 1, 128, 2, 16, 16)
    exact[1].data.fill_(-0.6065)
    single = [tensor.detach().float().requires_grad_() for tensor in exact]
    exact = [tensor.detach().double().requires_grad_() for tensor in single]
    weight = torch.randn(1, 128, 2, 16, dtype=torch.float64)
    wanted = torch.autograd.grad((reference.wkv7_recurrence(*exact)[0] * weight).sum(), exact)
    got = torch.autograd.grad((reference.wkv7(*single)[0] * weight.float()).sum(), single)
    for left, right in zip(got, wanted, strict=True):
        bar = 64 * torch.finfo(torch.float32).eps * 128**0.5 * right.abs().max().item()
        assert (left.double() - right).abs().max().item() < bar


@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_unit_lower_inverse(size: int) -> None:
    A = torch.randn(3, size, size, dtype=torch.float64).tril(-1) * 0.3
    identity = torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(
        reference.unit_lower_inverse(A) @ (identity - A), identity.expand(3, -1, -1), rtol=0, atol=1e-9
    )


def test_the_operator_refuses_shapes_that_disagree() -> None:
    r, log_w, k, v, a, b = inputs(8, 1, 5, 1, 4, 4)
    with pytest.raises(ValueError, match="must agree"):
        ops.wkv7(r, log_w, k[..., :3], v, a, b)


def test_autocast_keeps_the_recurrence_in_float32() -> None:
    tensors = inputs(9, 1, 12, 1, 4, 4, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, state = ops.wkv7(*tensors, return_state=True)
    assert state is not None
    assert state.dtype == torch.float32
    assert torch.equal(found, reference.wkv7(*tensors)[0])
