"""Rows of chunks of the plastic update against one chunk after another, and what a row may be: any split, documents."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
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


@given(
    seed=st.integers(0, 2**20),
    tokens=st.integers(1, 40),
    chunk=st.integers(1, 17),
    rank=st.integers(1, 6),
    width=st.integers(1, 9),
    rule=st.sampled_from(["hebb", "delta", "oja"]),
    packed=st.booleans(),
    singly=st.booleans(),
    data=st.data(),
)
def test_a_row_is_its_chunks_one_after_another_at_any_split(
    seed: int,
    tokens: int,
    chunk: int,
    rank: int,
    width: int,
    rule: str,
    packed: bool,
    singly: bool,
    data: st.DataObject,
) -> None:
    x = tensors(seed, 2, tokens, rank, width, rule)
    starts = None
    if packed:
        starts = torch.rand(2, tokens, generator=torch.Generator().manual_seed(seed)) < 0.15
    cuts = set(range(1, tokens)) if singly else data.draw(st.sets(st.integers(1, tokens), max_size=4))
    ends = sorted(cuts | {tokens})
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


def of_a_token(seed: int, batch: int, outputs: int, rank: int, width: int, gates: int) -> dict[str, Tensor]:
    """The arguments of `plastic_step`, float64; own has two columns that are not used."""
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "y": (batch, outputs),
        "own": (batch, width + 2 * gates + rank + 2),
        "last": (batch, width + gates),
        "b_up": (outputs, rank),
        "rate": (1,),
        "a": (batch, rank, width),
        "pending": (batch, rank, width),
    }
    return {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}


OF_STEPS = {"alpha": ALPHA, "decay": DECAY, "limit": LIMIT}


@given(
    seed=st.integers(0, 2**20),
    batch=st.integers(1, 5),
    sizes=st.tuples(st.integers(1, 19), st.integers(1, 17), st.integers(1, 33)),
    gates=st.sampled_from([0, 1]),
    rule=st.sampled_from(["hebb", "delta", "oja"]),
    at=st.sampled_from([(1, 0), (5, 0), (5, 2), (5, 4)]),
)
def test_a_step_is_a_row_of_one_token_in_float64_and_in_the_kernel(
    seed: int, batch: int, sizes: tuple[int, int, int], gates: int, rule: str, at: tuple[int, int]
) -> None:
    (outputs, rank, width), (chunk, position) = sizes, at
    x = of_a_token(seed, batch, outputs, rank, width, gates)
    own, last, place = x["own"], x["last"], {"chunk": chunk, "position": position, "rule": rule}

    def unit(z: Tensor) -> Tensor:
        return (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt()).unsqueeze(1)

    beta = 2 * x["rate"].sigmoid().expand(batch, 1)
    if gates:
        beta = beta * (last[:, width:] + own[:, width + 1 : width + 2]).sigmoid()
    first = width + 2 * gates
    values = own[:, None, first : first + rank]
    inputs, w = x["y"].unsqueeze(1), torch.eye(outputs, dtype=torch.float64)
    q, k = unit(own[:, :width]), unit(last[:, :width])
    expected = ops.plastic_chunks(
        inputs, w, x["b_up"], q, k, values, beta, x["a"], x["pending"], **place, **OF_STEPS
    )  # fmt: skip
    narrow = {name: tensor.float() for name, tensor in x.items()}
    with torch.no_grad():
        exact = ops.plastic_step(
            **{name: tensor.clone() for name, tensor in x.items()}, **place, **OF_STEPS, floor=1e-6
        )
        made = ops.plastic_step(**narrow, **place, **OF_STEPS, floor=1e-6)
    assert torch.equal(exact.last, own[:, : width + gates])
    assert torch.equal(made.last, own[:, : width + gates].float())
    # float32: a sum of up to 33 products of A and a unit key is at most |A| sqrt(33), and B A q sums up to 17 of these;
    # `size` is above both. Inputs and terms are rounded once each. The roundings of a sum are not of one sign: the
    # largest error of 2,000 random examples was 0.33 eps size.
    for name, one, two in zip(("y", "a", "pending"), exact, made, strict=False):
        right = getattr(expected, name).squeeze(1) if name == "y" else getattr(expected, name)
        size = 1 + sum(float(x[each].abs().max()) for each in ("y", "own", "a", "pending")) * rank * width**0.5
        assert (one - right).abs().max() < 1e-12 * right.abs().max().clamp(min=1), name
        assert (two - right).abs().max() < torch.finfo(torch.float32).eps * size, name


def test_a_step_gives_a_row_the_same_bits_in_any_batch_and_refuses_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("numba")
    monkeypatch.setenv("CDRMIX_BACKEND", "cpu")
    x = {name: tensor.float() for name, tensor in of_a_token(1, 70, 24, 16, 64, 1).items()}  # two threads' work
    options = {"chunk": 9, "position": 2, **OF_STEPS}

    def step(**arguments: Tensor) -> tuple[Tensor, ...]:
        return ops.plastic_step(**{name: tensor.clone() for name, tensor in arguments.items()}, **options)

    with torch.no_grad():
        whole = step(**x)
        for row in (0, 33, 69):
            alone = step(**{name: x[name] if name in ("b_up", "rate") else x[name][row : row + 1] for name in x})
            assert all(torch.equal(one[0], all_rows[row]) for one, all_rows in zip(alone, whole, strict=True))
        with pytest.raises(ValueError, match=r"do not fit together: .* pending \[70, 16, 63\]"):
            step(**x | {"pending": x["pending"][..., 1:]})
        with pytest.raises(ValueError, match="choose one of hebb, delta, oja"):
            ops.plastic_step(**x, **options, rule="other")
    with pytest.raises(ValueError, match="plastic_step has no gradient"):
        step(**x)


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
