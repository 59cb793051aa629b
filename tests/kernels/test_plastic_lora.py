"""The plastic low-rank update against its token-by-token definition in float64, and against itself bit for bit."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from cdrmix import ops
from cdrmix.kernels.fast_weights import reference as reference_plastic
from cdrmix.ops import fast_weights as plastic

RULES = reference_plastic.RULES
NAMES = ("x", "w", "b_up", "q", "k", "v", "beta", "a_state")
STEP = {"alpha": 0.7, "decay": 0.9}
# Relative to the largest value. Float64: sums of at most 300 products, and the inverse of a piece, well conditioned for
# keys of norm 1: 1e-12 is 5e3 eps. Float32: 256 eps, as every op has (test_ops.py).
FLOAT64, FLOAT32 = 1e-12, 256 * torch.finfo(torch.float32).eps


def inputs(
    tokens: int,
    rank: int,
    width: int,
    *,
    lead: tuple[int, ...] = (2,),
    sizes: tuple[int, int] = (6, 7),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Keys and values of norm 1, rates from 0 to 1, everything else normal; all of them leaves."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = {
        "x": normal(*lead, tokens, sizes[0]),
        "w": normal(sizes[1], sizes[0]) / sizes[0] ** 0.5,
        "b_up": normal(sizes[1], rank),
        "q": functional.normalize(normal(*lead, tokens, width), dim=-1),
        "k": functional.normalize(normal(*lead, tokens, width), dim=-1),
        "v": functional.normalize(normal(*lead, tokens, rank), dim=-1),
        "beta": normal(*lead, tokens).sigmoid(),
        "a_state": normal(*lead, rank, width) / width**0.5,
    }
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items()}


def double(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}


def results(function: Any, tensors: dict[str, Tensor], **options: Any) -> list[Tensor]:
    """y, A', and the gradients of all eight tensors from both of them."""
    y, a_next = function(**tensors, **(STEP | options))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype) for out in (y, a_next)]
    gradients = torch.autograd.grad((y, a_next), [tensors[name] for name in NAMES], weights)
    return [y.detach(), a_next.detach(), *gradients]


def assert_near(found: list[Tensor], wanted: list[Tensor], bar: float) -> None:
    for name, left, right in zip(("y", "a_next", *NAMES), found, wanted, strict=True):
        assert left.shape == right.shape, name
        error = (left.double() - right.double()).abs().max().item()
        assert error <= bar * max(right.abs().max().item(), 1e-3), f"{name}: {error:.2e}"


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for name, left, right in zip(("y", "a_next", *NAMES), found, wanted, strict=True):
        assert torch.equal(left, right), name


@given(
    seed=st.integers(0, 10**6),
    rule=st.sampled_from(RULES),
    tokens=st.integers(1, 140),
    rank=st.integers(1, 20),
    width=st.sampled_from([0, 5, 70]),
    branches=st.sampled_from([(), (3,)]),
    rate=st.sampled_from([0.0, 0.03, 1.0]),
)
@settings(phases=[Phase.generate])
def test_equals_the_definition(
    seed: int, rule: str, tokens: int, rank: int, width: int, branches: tuple[int, ...], rate: float
) -> None:
    """width 0: keys as wide as the rank; 70: beyond what wkv7 serves, in pieces."""
    tensors = inputs(tokens, rank, width or rank, seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        starts = torch.rand(2, tokens) < rate
        if branches:
            tensors["beta"] = torch.rand(*branches, 2, tokens, dtype=torch.float64, requires_grad=True)
    options = {"rule": rule, "starts": None if rate == 0 else starts}
    wanted = results(reference_plastic.plastic_lora_loop, tensors, **options)
    assert_near(results(ops.plastic_lora, tensors, **options), wanted, FLOAT64)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [3, 66])
def test_gradients_by_differences(rule: str, width: int) -> None:
    tensors = inputs(5, 3, width, lead=(), sizes=(2, 3))
    starts = torch.tensor([False, False, True, False, False])
    for given_starts in (None, starts):

        def step(*values: Tensor, starts: Tensor | None = given_starts) -> tuple[Tensor, Tensor]:
            return ops.plastic_lora(*values, **STEP, rule=rule, starts=starts)

        assert torch.autograd.gradcheck(step, tuple(tensors.values()), fast_mode=width > 3)


def test_gradients_of_the_pieces_by_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pieces, the last one padded."""
    monkeypatch.setattr(reference_plastic, "PIECE", 4)
    tensors = inputs(10, 3, 5, lead=(2,))
    values = tuple(tensors[name] for name in ("k", "v", "beta", "a_state"))
    assert torch.autograd.gradcheck(lambda *x: plastic._plastic_delta(*x, True)[0], values)


def test_pieces_and_wkv7_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(150, 12, 30)
    wanted = results(ops.plastic_lora, tensors)
    monkeypatch.setattr(plastic, "NARROW", 0)
    assert_near(results(ops.plastic_lora, tensors), wanted, FLOAT64)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("rank", "width"), [(8, 8), (12, 12), (16, 16), (24, 24), (32, 32), (100, 100), (12, 300)])
def test_float32_is_near_float64(rule: str, rank: int, width: int) -> None:
    """Ranks between the kernels' widths are padded; hebb has one product, wide keys have pieces."""
    tensors = inputs(100, rank, width, dtype=torch.float32)
    wanted = results(reference_plastic.plastic_lora_loop, double(tensors), rule=rule)
    assert_near(results(ops.plastic_lora, tensors, rule=rule), wanted, FLOAT32)


@pytest.mark.parametrize(("rule", "width"), [("delta", 12), ("delta", 90), ("hebb", 12), ("oja", 12)])
def test_half_precision_has_a_float32_state(rule: str, width: int) -> None:
    """A' is what float32 makes of the rounded inputs; y is rounded at most three times: reads, base product, sum."""
    tensors = inputs(60, 12, width, dtype=torch.bfloat16)
    tensors["a_state"] = tensors["a_state"].detach().float().requires_grad_()
    wanted = results(reference_plastic.plastic_lora_loop, double(tensors), rule=rule)
    found = results(ops.plastic_lora, tensors, rule=rule)
    assert [x.dtype for x in found] == [torch.bfloat16, torch.float32, *[torch.bfloat16] * 7, torch.float32]
    assert (found[1].double() - wanted[1]).abs().max() < FLOAT32 * wanted[1].abs().max()
    ratios = [((x.double() - y).norm() / y.norm()).item() for x, y in zip(found, wanted, strict=True)]
    assert max(ratios) < 6e-3  # 2^-9 / sqrt(3) = 1.1e-3 a rounding, and at most five of them on the way to a gradient


def orthonormal(count: int, width: int) -> Tensor:
    return torch.linalg.qr(torch.randn(width, count, generator=torch.Generator().manual_seed(3)))[0].mT.contiguous()


@pytest.mark.parametrize("width", [16, 200])
@pytest.mark.parametrize("rule", ["hebb", "delta"])
def test_what_was_stored_is_recalled(rule: str, width: int) -> None:
    """Orthonormal keys, hand-set values, rate 1: they come back n chunks later, times decay^n under hebb."""
    pairs, later, decay = 12, 4, 0.8
    keys, values = orthonormal(pairs, width), torch.randn(pairs, 16)
    x, w, b_up = torch.zeros(pairs, 4), torch.zeros(16, 4), torch.eye(16)
    nothing, ones = torch.zeros(pairs), torch.ones(pairs)
    step = functools.partial(ops.plastic_lora, x, w, b_up, keys, keys, rule=rule, alpha=1.0)
    y, a = step(values, ones, torch.zeros(16, width), decay=decay)
    assert (y == 0).all()  # read before write
    for _ in range(later):
        y, a = step(values, nothing, a, decay=decay)
    # y is what the last of these chunks read: the first of them read the state that no later decay had touched.
    torch.testing.assert_close(y, values * decay ** (later - 1), rtol=1e-5, atol=1e-5)
    replaced = values.flip(0)
    _, a = step(replaced, ones, a, decay=1.0)
    y, _ = step(values, nothing, a, decay=1.0)
    rest = values * decay**later if rule == "hebb" else 0.0
    torch.testing.assert_close(y, replaced + rest, rtol=1e-5, atol=1e-5)


def test_ojas_rule_stores_what_is_new_for_the_value() -> None:
    """With orthonormal values, A^T v is the key that v holds: at rate 1 it is replaced, exactly."""
    keys, values = torch.randn(12, 16), orthonormal(12, 16)
    step = functools.partial(ops.plastic_lora, torch.zeros(12, 4), torch.zeros(3, 4), torch.zeros(3, 16), keys)
    _, a = step(keys, values, torch.ones(12), torch.zeros(16, 16), alpha=1.0, decay=1.0, rule="oja")
    torch.testing.assert_close(values @ a, keys, rtol=1e-5, atol=1e-5)
    _, a = step(2 * keys, values, torch.ones(12), a, alpha=1.0, decay=1.0, rule="oja")
    torch.testing.assert_close(values @ a, 2 * keys, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [12, 80])
def test_branches_have_the_bits_of_calls_apart(rule: str, width: int) -> None:
    """Rates and states of three branches, the tokens shared: one projection, and three times the same call."""
    tensors = inputs(70, 12, width, dtype=torch.float32)
    beta = torch.rand(3, 2, 70)
    states = torch.randn(3, 2, 12, width)
    y, a_next = ops.plastic_lora(**(tensors | {"beta": beta, "a_state": states}), **STEP, rule=rule)
    assert (y.shape, a_next.shape) == ((3, 2, 70, 7), (3, 2, 12, width))
    for branch in range(3):
        alone = tensors | {"beta": beta[branch], "a_state": states[branch]}
        one, state = ops.plastic_lora(**alone, **STEP, rule=rule)
        assert torch.equal(y[branch], one)
        torch.testing.assert_close(a_next[branch], state, rtol=0, atol=0 if rule != "hebb" else 1e-6)


def test_branches_in_any_place() -> None:
    """A dimension that x has not need not be the first; one that only x has is a dimension of y alone."""
    tensors = inputs(9, 4, 4, lead=(2, 1, 3))
    tensors["a_state"] = torch.randn(2, 5, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    wanted = results(reference_plastic.plastic_lora_loop, tensors)
    assert wanted[0].shape == (2, 5, 3, 9, 7)
    assert_near(results(ops.plastic_lora, tensors), wanted, FLOAT64)
    shared = inputs(9, 4, 4, lead=()) | {"x": torch.randn(2, 3, 9, 6, dtype=torch.float64, requires_grad=True)}
    wanted = results(reference_plastic.plastic_lora_loop, shared)
    assert (wanted[0].shape, wanted[1].shape) == ((2, 3, 9, 7), (4, 4))
    assert_near(results(ops.plastic_lora, shared), wanted, FLOAT64)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [8, 80])
def test_starts_make_separate_documents(rule: str, width: int) -> None:
    tensors = {name: x.detach() for name, x in inputs(50, 8, width, lead=()).items()}
    cuts = (0, 7, 30, 50)
    starts = torch.zeros(50, dtype=torch.bool)
    starts[list(cuts[1:-1])] = True
    y, a_next = ops.plastic_lora(**tensors, **STEP, rule=rule, starts=starts)
    for number, (start, end) in enumerate(itertools.pairwise(cuts)):
        part = {name: x[start:end] if name in ("x", "q", "k", "v", "beta") else x for name, x in tensors.items()}
        part["a_state"] = tensors["a_state"] * (number == 0)
        alone, last = ops.plastic_lora(**part, **STEP, rule=rule)
        torch.testing.assert_close(y[start:end], alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(a_next, last, rtol=0, atol=1e-12)
    first = torch.zeros(50, dtype=torch.bool)
    first[0] = True  # a chunk that begins with a document forgets what was before it
    forgotten = results(ops.plastic_lora, {k: x.requires_grad_() for k, x in tensors.items()}, rule=rule, starts=first)
    assert torch.equal(forgotten[0], functional.linear(tensors["x"], tensors["w"]))
    assert (forgotten[-1] == 0).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [8, 80])
@pytest.mark.parametrize("name", ["k", "v", "beta", "a_state"])
def test_what_a_document_that_ended_held_does_not_matter(rule: str, width: int, name: str) -> None:
    tensors = inputs(20, 8, width, lead=())
    starts = torch.arange(20) == 9
    clean = results(ops.plastic_lora, tensors, rule=rule, starts=starts)
    with torch.no_grad():
        tensors[name].flatten()[0] = float("nan")
    y, a_next, *_ = results(ops.plastic_lora, tensors, rule=rule, starts=starts)
    assert torch.equal(a_next, clean[1])
    assert torch.equal(y[9:], clean[0][9:])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [6, 70])
def test_chained_chunks_with_gradients_are_one_long_loop(rule: str, width: int) -> None:
    """Three chunks, each reading what the one before left: the definition spelled out over all tokens."""
    chunk, count = 11, 3
    tensors = inputs(chunk * count, 6, width)
    a, outputs = tensors["a_state"], []
    for start in range(0, chunk * count, chunk):
        part = {n: x[:, start : start + chunk] if n in ("x", "q", "k", "v", "beta") else x for n, x in tensors.items()}
        y, a = ops.plastic_lora(**(part | {"a_state": a}), **STEP, rule=rule)
        outputs.append(y)

    read = written = tensors["a_state"]
    wanted = []
    for t in range(chunk * count):
        if t % chunk == 0:
            read, written = written, STEP["decay"] * written
        x, q, k, v, beta = (tensors[name][:, t] for name in ("x", "q", "k", "v", "beta"))
        low = torch.einsum("or,brd,bd->bo", tensors["b_up"], read, q)
        wanted.append(x @ tensors["w"].mT + STEP["alpha"] * low)
        if rule == "delta":
            v = v - torch.einsum("brd,bd->br", written, k)
        elif rule == "oja":
            k = k - torch.einsum("brd,br->bd", written, v)
        written = written + beta[:, None, None] * torch.einsum("br,bd->brd", v, k)

    found = [torch.cat(outputs, 1), a]
    for left, right in zip(found, (torch.stack(wanted, 1), written), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-11)
    leaves = list(tensors.values())
    weights = [torch.randn_like(out) for out in found]
    exact = torch.autograd.grad((torch.stack(wanted, 1), written), leaves, weights)
    for left, right in zip(torch.autograd.grad(found, leaves, weights), exact, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_without_writes_it_is_the_projection_to_the_bit(rule: str, dtype: torch.dtype) -> None:
    tensors = inputs(40, 12, 12, dtype=dtype, sizes=(96, 80))
    zeros = {"beta": torch.zeros(2, 40), "a_state": torch.zeros(2, 12, 12)}
    y, a_next = ops.plastic_lora(**(tensors | zeros), **STEP, rule=rule)
    assert torch.equal(y, functional.linear(tensors["x"], tensors["w"]))
    assert (a_next == 0).all()


def test_autocast_narrows_the_projection_alone() -> None:
    tensors = inputs(40, 12, 12, dtype=torch.float32)
    y, a_next = ops.plastic_lora(**tensors, **STEP)
    with torch.autocast("cpu", torch.bfloat16):
        narrow, same = ops.plastic_lora(**tensors, **STEP)
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(a_next, same)
    assert ((narrow - y).norm() / y.norm()).item() < 6e-3


@pytest.mark.parametrize(("rule", "width"), [(rule, width) for rule in RULES for width in (12, 80)])
def test_repeats_and_views_have_the_same_bits(rule: str, width: int) -> None:
    tensors = inputs(70, 12, width, dtype=torch.float32)
    wanted = results(ops.plastic_lora, tensors, rule=rule)
    for _ in range(5):
        assert_same(results(ops.plastic_lora, tensors, rule=rule), wanted)
    views = {name: torch.stack([x.detach(), x.detach()], -1)[..., 0].requires_grad_() for name, x in tensors.items()}
    assert not views["k"].is_contiguous()
    assert_same(results(ops.plastic_lora, views, rule=rule), wanted)


@pytest.mark.parametrize("width", [12, 80])
def test_only_wanted_gradients_are_made(width: int) -> None:
    """A frozen projection costs no gradient of its own; y depends on nothing that this chunk writes."""
    tensors = inputs(20, 12, width, dtype=torch.float32)
    wanted = results(ops.plastic_lora, tensors)
    for needed in NAMES:
        leaves = {name: x.detach().requires_grad_(name == needed) for name, x in tensors.items()}
        y, a_next = ops.plastic_lora(**leaves, **STEP)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(out.shape, generator=generator, dtype=torch.float64).float() for out in (y, a_next)]
        total = sum((out * weight).sum() for out, weight in zip((y, a_next), weights, strict=True))
        assert isinstance(total, Tensor)
        (gradient,) = torch.autograd.grad(total, leaves[needed])
        assert torch.equal(gradient, wanted[2 + NAMES.index(needed)]), needed
    y, _ = ops.plastic_lora(**tensors, **STEP)
    unused = [tensors[name] for name in ("k", "v", "beta")]
    assert torch.autograd.grad(y.sum(), unused, allow_unused=True) == (None, None, None)
    calls = [torch.empty(0)] * 4
    x, w, b_up, reads = (torch.randn(*shape) for shape in ((5, 3), (4, 3), (4, 2), (1, 5, 2)))
    calls = list(reference_plastic.project_backward(torch.randn(1, 5, 4), x, w, b_up, reads, [False] * 4))
    assert [dx.numel() for dx in calls] == [0] * 4


def test_commit_scales_long_rows_and_no_other() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(3, 24, 40, generator=generator) * torch.linspace(0, 1, 24)[:, None]
    a[0, 5] *= 1e15
    norms = a.double().norm(dim=-1)
    committed = ops.plastic_commit(a)
    within = norms <= 2.0
    assert 10 < int(within.sum()) < 60
    assert torch.equal(committed[within], a[within])
    new = committed.double().norm(dim=-1)
    assert bool((new <= 2.0).all())
    assert bool((new[~within] > 2.0 * (1 - 2**-20)).all())
    cosine = (committed.double() * a.double()).sum(-1)[~within] / (new * norms)[~within]
    torch.testing.assert_close(cosine, torch.ones_like(cosine), rtol=0, atol=1e-12)
    assert torch.equal(ops.plastic_commit(committed), committed)
    assert torch.equal(ops.plastic_commit(a, limit=1e30), a)


def test_commit_has_gradients() -> None:
    a = torch.randn(2, 5, 4, dtype=torch.float64)
    a[0, 0] = 0.0  # the norm has no derivative there, the op has
    a[1] *= 4
    assert torch.autograd.gradcheck(ops.plastic_commit, a.requires_grad_())
    (gradient,) = torch.autograd.grad(ops.plastic_commit(a).sum(), a)
    assert torch.equal(gradient[0, 0], torch.ones(4, dtype=torch.float64))
