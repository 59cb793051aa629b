"""The states of a row's chunks in one kernel against one chunk after another in float64, and through plastic_chunks."""

from __future__ import annotations

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from cdrmix import ops
from cdrmix.kernels.common.triton_helpers import INTERPRETED
from cdrmix.ops import fast_weight_chunks

interpreted = pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter is off; `-m gpu` compiles the kernels")
# Of the largest value. A state has products of at most 70 terms for each of 5 chunks, and so have the gradients on
# their way back: 70 * 5 roundings of 2^-24, of which a norm near the limit turns none into more than its own size.
BOUND = 350 * 2.0**-24


def one_by_one(
    keep: Tensor, add: Tensor, a: Tensor, pending: Tensor, drops: Tensor, decay: float, limit: float
) -> list[Tensor]:
    states = []
    for factor, update, drop in zip(keep.unbind(1), add.unbind(1), drops.unbind(1), strict=True):
        states.append(a)
        pending = torch.where(drop.bool()[:, None, None], 0.0, pending)
        a = ops.plastic_commit(pending @ factor + update, limit)
        pending = decay * a
    return [torch.stack(states, 1), a]


def compare(sizes: tuple[int, int, int, int], seed: int, decay: float, limit: float, device: str) -> None:
    batch, chunks, rank, width = sizes
    random = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random)

    # Maps near the identity, as those of chunks with few writes: the states stay of some units.
    keep = torch.eye(width) + normal(batch, chunks, width, width) / (4 * width**0.5)
    given = [keep, normal(batch, chunks, rank, width), *(normal(batch, rank, width) for _ in range(2))]
    inputs = [tensor.to(device).requires_grad_() for tensor in given]
    exact = [tensor.double().requires_grad_() for tensor in given]
    drops = torch.randint(0, 4, (batch, chunks), generator=random) == 0
    found = fast_weight_chunks._plastic_states(*inputs, drops.to(device, torch.int8), decay, limit)
    wanted = one_by_one(*exact, drops, decay, limit)
    directions = [torch.randn(each.shape, generator=random, dtype=torch.float64) for each in wanted]
    gradients = torch.autograd.grad(found, inputs, [each.to(device).float() for each in directions])
    pairs = [
        *zip(found, wanted, strict=True),
        *zip(gradients, torch.autograd.grad(wanted, exact, directions), strict=True),
    ]
    for one, other in pairs:
        assert one.isfinite().all()
        assert (one.cpu().double() - other).abs().max() <= BOUND * other.abs().max().clamp(min=1)
    assert (found[1].detach().double().norm(dim=-1) <= limit).all(), (
        "rows are within the limit, as plastic_commit has them"
    )


@interpreted
@settings(max_examples=examples(8))
@given(
    batch=st.integers(1, 3),
    chunks=st.integers(1, 5),
    rank=st.sampled_from([1, 12, 16, 70]),  # 70: five programs share the maps, whose gradients are added
    width=st.sampled_from([1, 12, 33, 64]),
    decay=st.sampled_from([0.0, 0.9, 1.0]),
    limit=st.sampled_from([0.1, 3.0, 1e3]),
    seed=st.integers(0, 99),
)
def test_states_and_gradients_equal_float64(
    batch: int, chunks: int, rank: int, width: int, decay: float, limit: float, seed: int
) -> None:
    compare((batch, chunks, rank, width), seed, decay, limit, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [0.1, 3.0, 1e3])
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 5, 12, 33), (8, 8, 16, 64), (3, 4, 70, 64)])
def test_on_a_gpu_they_equal_float64(sizes: tuple[int, int, int, int], limit: float) -> None:
    compare(sizes, 1, 0.9, limit, "cuda")


def rows_of_chunks(rank: int, chunks: int, starts: list[int], device: str) -> None:
    """Values and gradients of `plastic_chunks` in float32, with the kernels, against float64 on a CPU.

    chunks: whole ones, before a part of one. starts: tokens of the second row at which documents begin.
    """
    random = torch.Generator().manual_seed(4)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64)

    tokens, width = chunks * 8 + 5, 60  # with the identity more rows of values than a head of wkv7 has
    exact = {
        "x": normal(2, tokens, 7),
        "w": normal(5, 7),
        "b_up": normal(5, rank),
        "q": functional.normalize(normal(2, tokens, width), dim=-1),
        "k": functional.normalize(normal(2, tokens, width), dim=-1),
        "v": normal(2, tokens, rank),
        "beta": torch.rand(2, tokens, generator=random, dtype=torch.float64),
        "a": normal(2, rank, width),
        "pending": normal(2, rank, width),
    }
    found = {name: tensor.to(device, torch.float32).requires_grad_() for name, tensor in exact.items()}
    for tensor in exact.values():
        tensor.requires_grad_()
    begins = torch.zeros(2, tokens, dtype=torch.bool)
    begins[1, starts] = True
    place = {"chunk": 8, "position": 0, "alpha": 0.3, "decay": 0.9, "limit": 3.0}
    results = [ops.plastic_chunks(**inputs, **place, starts=begins.to(inputs["x"].device)) for inputs in (found, exact)]
    directions = [normal(*each.shape) for each in results[1]]
    pairs = list(zip(*results, strict=True))
    gradients = [
        torch.autograd.grad(result, list(inputs.values()), [each.to(result[0]) for each in directions])
        for result, inputs in zip(results, (found, exact), strict=True)
    ]
    for one, other in [*pairs, *zip(*gradients, strict=True)]:
        # Chunks of 8 tokens, whose updates have products of 60 terms.
        assert (one.cpu().double() - other).abs().max() <= (chunks + 1) * 8 * 60 * 2.0**-24 * other.abs().max()


# Rank 12: two heads of values; 70: three, and five programs for the states. Documents that begin with a chunk, inside
# of one, twice in one and in the part of a chunk at the end; none.
ROWS = [(12, 3, []), (12, 3, [3, 8, 17, 19, 26]), pytest.param(70, 3, [8], marks=pytest.mark.long)]


@interpreted
@pytest.mark.parametrize(("rank", "chunks", "starts"), [(12, 2, [3, 8, 11, 18]), *ROWS[2:]])
def test_rows_of_chunks_with_the_kernels(
    rank: int, chunks: int, starts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first row is one document."""
    monkeypatch.setenv("CDRMIX_BACKEND", "triton")
    called = []
    states = fast_weight_chunks._plastic_states
    monkeypatch.setattr(fast_weight_chunks, "_plastic_states", lambda *inputs: called.append(1) or states(*inputs))
    rows_of_chunks(rank, chunks, starts, "cpu")
    assert called, "several whole chunks are one kernel"


@pytest.mark.gpu
@pytest.mark.parametrize(("rank", "chunks", "starts"), ROWS)
def test_rows_of_chunks_on_a_gpu(rank: int, chunks: int, starts: list[int]) -> None:
    rows_of_chunks(rank, chunks, starts, "cuda")
