"""Digests of tensors against their definition in plain integers, whole and in parts."""

from __future__ import annotations

import itertools
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdrmix.training import digests
from cdrmix.training.digests import ROW, WIDTH, digest

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]


def defined(tensor: torch.Tensor) -> int:
    """The sum over words of 64 bits and their upper halves; the last word is filled up with zeros."""
    data = tensor.view(torch.uint8).numpy().tobytes()
    words = struct.unpack(f"<{-(-len(data) // 8)}Q", data + bytes(-len(data) % 8))
    columns = digests._columns(tensor.device).tolist()
    return sum((word + (word >> 32)) * (columns[n % WIDTH] + n // WIDTH * ROW) for n, word in enumerate(words)) % 2**64


def values(dtype: torch.dtype, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return (20 * torch.randn(count, generator=generator, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    count=st.one_of(st.integers(0, 40), st.integers(2 * WIDTH - 20, 2 * WIDTH + 20), st.just(6 * WIDTH + 123)),
    cuts=st.lists(st.integers(0, 7 * WIDTH), max_size=5),
)
def test_the_sum_of_the_parts_is_the_definition(dtype: torch.dtype, count: int, cuts: list[int]) -> None:
    tensor = values(dtype, count)
    edges = [0, *sorted(min(cut, count) for cut in cuts), count]
    parts = [digest(tensor[begin:end], begin) for begin, end in itertools.pairwise(edges)]
    apart = [digest(tensor[begin:end].clone(), begin) for begin, end in itertools.pairwise(edges)]
    assert [int(sum(each)) % 2**64 for each in (parts, apart)] == [defined(tensor)] * 2


def test_a_long_tensor_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = values(torch.float32, 5 * WIDTH + 3)
    monkeypatch.setattr(digests, "MOST", 2 * WIDTH + 8)
    assert int(digest(tensor)) % 2**64 == defined(tensor)


@pytest.mark.parametrize(("dtype", "integer"), [(torch.float32, torch.int32), (torch.bfloat16, torch.int16)])
def test_every_bit_matters(dtype: torch.dtype, integer: torch.dtype) -> None:
    """Of each place of two words, and of many words: their numbers are odd or even."""
    tensor, width = values(dtype, 2 * WIDTH), 8 * dtype.itemsize
    whole = digest(tensor) >> 32
    for place in (*range(16), *range(0, 2 * WIDTH, 97)):
        for bit in range(width):
            changed = tensor.clone()
            changed.view(integer)[place] ^= (1 << bit) - (1 << width if bit == width - 1 else 0)
            assert digest(changed) >> 32 != whole, (place, bit)


@given(place=st.integers(0, 3 * WIDTH - 1), other=st.integers(0, 3 * WIDTH - 1))
def test_signs_and_the_order_matter(place: int, other: int) -> None:
    tensor = values(torch.float32, 3 * WIDTH)
    changed, swapped = tensor.clone(), tensor.clone()
    changed[[place, other]] *= -1
    swapped[[place, other]] = swapped[[other, place]]
    assert digest(changed) >> 32 != digest(tensor) >> 32
    assert (digest(swapped) >> 32 == digest(tensor) >> 32) == torch.equal(swapped, tensor)
