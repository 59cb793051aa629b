"""Rows of chunks of the plastic update against one chunk after another, and what a row may be: any split, documents."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from cdrmix import ops

# Two float64 evaluations of a product of at most 40 chunks' maps, each of norm 1, values of some units.
BOUND = 1e-11
LIMIT, DECAY, ALPHA = 1.5, 0.9, 0.3


def tensors(seed: int, batch: int, tokens: int, rank: int, width: int, rule: str, prefix: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64)

    unit = functional.normalize
    k, v = unit(normal(batch, tokens, width), dim=-1), normal(batch, tokens, rank)
    return {
        "x": normal(batch, prefix + tokens, 7),
        "w": normal(5, 7),
        "b_up": normal(5, rank),
        "q": unit(normal(batch, prefix + tokens, width), dim=-1),
        "k": k,
        "v": unit(v, dim=-1) if rule == "oja" else v,  # as the delta rule needs it of keys
        "beta": 2 * torch.rand(batch, tokens, generator=random, dtype=torch.float64),
        "a": normal(batch, rank, width),
    }


def by_chunks(x: dict[str, Tensor], chunk: int, rule: str, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Whole chunks and a shorter last one, each by `plastic_lora` and, where it is over, `plastic_commit`."""
    a, ys = x["a"], []
    tokens = x["k"].shape[1]
    for start in range(0, tokens, chunk):
        part = {name: x[name][:, start : start + chunk] for name in ("x", "q", "k", "v", "beta")}
        here = None if starts is None else starts[:, start : start + chunk]
        y, a = ops.plastic_lora(
            part["x"], x["w"], x["b_up"], part["q"], part["k"], part["v"], part["beta"], a,
            alpha=ALPHA, decay=DECAY, rule=rule, starts=here,
        )  # fmt: skip
        a = ops.plastic_commit(a, LIMIT) if start + chunk <= tokens else a
        ys.append(y)
    return torch.cat(ys, 1), a


def in_a_row(
    x: dict[str, Tensor], chunk: int, rule: str, starts: Tensor | None, ends: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The same tokens in calls that end at `ends`."""
    a, pending, ys = x["a"], DECAY * x["a"], []
    for start, end in itertools.pairwise([0, *ends]):
        part = {name: x[name][:, start:end] for name in ("x", "q", "k", "v", "beta")}
        y, _, a, pending = ops.plastic_chunks(
            part["x"], x["w"], x["b_up"], part["q"], part["k"], part["v"], part["beta"], a, pending,
            chunk=chunk, position=start % chunk, alpha=ALPHA, decay=DECAY, limit=LIMIT, rule=rule,
            starts=None if starts is None else starts[:, start:end],
        )  # fmt: skip
        ys.append(y)
    return torch.cat(ys, 1), a, pending


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    tokens=st.integers(1, 40),
    chunk=st.integers(1, 17),
    rank=st.integers(1, 6),
    width=st.integers(1, 9),
    rule=st.sampled_from(["hebb", "delta", "oja"]),
    packed=st.booleans(),
    data=st.data(),
)
def test_a_row_is_its_chunks_one_after_another_at_any_split(
    seed: int, tokens: int, chunk: int, rank: int, width: int, rule: str, packed: bool, data: st.DataObject
) -> None:
    x = tensors(seed, 2, tokens, rank, width, rule)
    starts = None
    if packed:
        starts = torch.rand(2, tokens, generator=torch.Generator().manual_seed(seed)) < 0.15
    ends = sorted(data.draw(st.sets(st.integers(1, tokens), max_size=4)) | {tokens})
    y, a, pending = in_a_row(x, chunk, rule, starts, ends)
    expected_y, expected_a = by_chunks(x, chunk, rule, starts)
    assert (y - expected_y).abs().max() < BOUND
    last = a if tokens % chunk == 0 else pending
    assert (last - expected_a).abs().max() < BOUND


@pytest.mark.parametrize("rule", ["hebb", "delta", "oja"])
def test_gradients_are_those_of_chunks_one_after_another(rule: str) -> None:
    random = torch.Generator().manual_seed(3)
    starts = torch.rand(2, 22, generator=random) < 0.1
    cotangents = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in ((2, 22, 5), (2, 3, 4))]
    gradients = []
    for way in (by_chunks, lambda x, *rest: in_a_row(x, *rest, [5, 22])):
        x = {name: tensor.requires_grad_() for name, tensor in tensors(1, 2, 22, 3, 4, rule).items()}
        y, *_, last = way(x, 6, rule, starts)
        gradients.append(torch.autograd.grad([y, last], list(x.values()), cotangents))
    for name, one, two in zip(x, *gradients, strict=True):
        assert one.abs().max() > 0, name
        assert (one - two).abs().max() < 100 * BOUND, name


def test_a_prefix_reads_what_the_first_chunk_reads_and_writes_nothing() -> None:
    x = tensors(5, 2, 12, 3, 4, "delta", prefix=3)
    arguments = {"chunk": 5, "position": 0, "alpha": ALPHA, "decay": DECAY, "limit": LIMIT}
    tail = [x[name] for name in ("k", "v", "beta", "a")]
    y, _, a, _ = ops.plastic_chunks(x["x"], x["w"], x["b_up"], x["q"], *tail, DECAY * x["a"], prefix=3, **arguments)
    own, _, own_a, _ = ops.plastic_chunks(
        x["x"][:, 3:], x["w"], x["b_up"], x["q"][:, 3:], *tail, DECAY * x["a"], **arguments
    )
    assert torch.equal(a, own_a)
    assert (y[:, 3:] - own).abs().max() < BOUND
    reads = x["x"][:, :3] @ x["w"].mT + ALPHA * (x["q"][:, :3] @ x["a"].mT) @ x["b_up"].mT
    assert (y[:, :3] - reads).abs().max() < BOUND


def test_branches_write_apart_and_read_alike() -> None:
    x = tensors(6, 2, 5, 3, 4, "delta")
    scales = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    arguments = {"chunk": 5, "position": 0, "alpha": ALPHA, "decay": DECAY, "limit": LIMIT}
    head = [x[name] for name in ("x", "w", "b_up", "q", "k", "v")]
    y, _, a, _ = ops.plastic_chunks(*head, scales[:, None, None] * x["beta"], x["a"], DECAY * x["a"], **arguments)
    assert a.shape == (3, 2, 3, 4)
    for scale, branch in zip(scales, a, strict=True):
        alone, _, alone_a, _ = ops.plastic_chunks(*head, scale * x["beta"], x["a"], DECAY * x["a"], **arguments)
        assert torch.equal(y, alone)
        assert (branch - alone_a).abs().max() < BOUND
    assert (a[2] - ops.plastic_commit(DECAY * x["a"], LIMIT)).abs().max() < BOUND


def test_a_rule_that_there_is_not_is_named() -> None:
    x = tensors(7, 1, 3, 2, 2, "delta")
    with pytest.raises(ValueError, match="choose one of hebb, delta, oja"):
        ops.plastic_chunks(
            *(x[name] for name in ("x", "w", "b_up", "q", "k", "v", "beta", "a")), x["a"],
            chunk=4, position=0, alpha=1.0, decay=1.0, limit=2.0, rule="other",
        )  # fmt: skip
