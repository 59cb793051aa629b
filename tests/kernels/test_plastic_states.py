"""The states of a row's chunks in one kernel against one chunk after another in float64, and through plastic_chunks."""

from __future__ import annotations

import pytest
import torch
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


def one_by_one(keep: Tensor, add: Tensor, a: Tensor, pending: Tensor, decay: float, limit: float) -> list[Tensor]:
    states = []
    for factor, update in zip(keep.unbind(1), add.unbind(1), strict=True):
        states.append(a)
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
    found, wanted = fast_weight_chunks._plastic_states(*inputs, decay, limit), one_by_one(*exact, decay, limit)
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
@settings(max_examples=20)
@given(
    batch=st.integers(1, 3),
    chunks=st.integers(1, 5),
    rank=st.sampled_from([1, 12, 16, 70]),  # 70: two programs share the maps, whose gradients are added
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


def rows_of_chunks(device: str) -> None:
    """Values and gradients of `plastic_chunks` in float32, with the kernels, against float64 on a CPU."""
    random = torch.Generator().manual_seed(4)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64)

    tokens, rank, width = 3 * 8 + 5, 12, 60  # with the identity 72 rows of values: more than one head of wkv7
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
    place = {"chunk": 8, "position": 0, "alpha": 0.3, "decay": 0.9, "limit": 3.0}
    results = [ops.plastic_chunks(**inputs, **place) for inputs in (found, exact)]
    directions = [normal(*each.shape) for each in results[1]]
    pairs = list(zip(*results, strict=True))
    gradients = [
        torch.autograd.grad(result, list(inputs.values()), [each.to(result[0]) for each in directions])
        for result, inputs in zip(results, (found, exact), strict=True)
    ]
    for one, other in [*pairs, *zip(*gradients, strict=True)]:
        # Four chunks of 8 tokens, whose updates have products of 60 terms.
        assert (one.cpu().double() - other).abs().max() <= 4 * 8 * 60 * 2.0**-24 * other.abs().max()


@interpreted
def test_rows_of_chunks_with_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", "triton")
    called = []
    states = fast_weight_chunks._plastic_states
    monkeypatch.setattr(fast_weight_chunks, "_plastic_states", lambda *inputs: called.append(1) or states(*inputs))
    rows_of_chunks("cpu")
    assert called, "several whole chunks are one kernel"


@pytest.mark.gpu
def test_rows_of_chunks_on_a_gpu() -> None:
    rows_of_chunks("cuda")
