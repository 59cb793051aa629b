"""The linear cross-entropy: against PyTorch's own in float64, with every option; what it counts, keeps and refuses."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from cdrmix import ops
from cdrmix.kernels.cross_entropy import reference as reference_loss
from cdrmix.ops import cross_entropy as loss
from cdrmix.ops import weights

IGNORED = -100
EPS = torch.finfo(torch.float64).eps


@dataclasses.dataclass
class Case:
    """A call: hidden [R, D] or [S, R, D], weight [V, D], targets and weights [R] or [S, R], and the options."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    weights: Tensor | None
    options: dict[str, float]

    def wide(self) -> Case:
        """The same values in float64."""
        hidden, weight = (x.detach().double().requires_grad_() for x in (self.hidden, self.weight))
        return dataclasses.replace(
            self, hidden=hidden, weight=weight, weights=None if self.weights is None else self.weights.double()
        )

    def run(self) -> Tensor:
        return ops.linear_cross_entropy(self.hidden, self.weight, self.targets, weights=self.weights, **self.options)

    def gradients(self, dloss: Tensor | None = None) -> list[Tensor]:
        """The losses, dhidden, dweight."""
        losses = self.run()
        dloss = torch.ones_like(losses) if dloss is None else dloss
        return [losses.detach(), *torch.autograd.grad(losses, [self.hidden, self.weight], dloss)]

    def exact(self, dloss: Tensor | None = None) -> list[Tensor]:
        """By PyTorch in the dtype of the case, with all logits at once."""
        logits = self.hidden @ self.weight.mT
        smoothing, z_loss = self.options.get("label_smoothing", 0.0), self.options.get("z_loss", 0.0)
        shared = logits.expand(*self.targets.shape, -1)
        nats = functional.cross_entropy(
            shared.flatten(0, -2), self.targets.flatten(), reduction="none", label_smoothing=smoothing
        ).view_as(self.targets)
        counted = (self.targets != IGNORED).to(nats.dtype)
        nats = nats + counted * z_loss * shared.logsumexp(-1).square()
        losses = (nats if self.weights is None else nats * self.weights).sum(-1)
        dloss = torch.ones_like(losses) if dloss is None else dloss
        return [losses.detach(), *torch.autograd.grad(losses, [self.hidden, self.weight], dloss)]


def make(
    R: int,
    D: int,
    V: int,
    *,
    sets: int = 0,
    own: bool = False,
    weighted: bool = False,
    ignored: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **options: float,
) -> Case:
    """Logits of order 1. sets: 0 for targets [R]; own: hidden states for each set; ignored: a third of the targets."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sets, R) if sets else (R,)
    hidden = torch.randn(*(shape if own else (R,)), D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64) / D**0.5
    targets = torch.randint(0, V, shape, generator=generator)
    if ignored:
        targets[torch.rand(shape, generator=generator) < 1 / 3] = IGNORED
    weights = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.25 if weighted else None
    if weights is not None:
        weights[..., ::4] = 0
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
    return Case(*leaves, targets, weights if weights is None else weights.to(dtype), options)


def assert_near(found: list[Tensor], wanted: list[Tensor], terms: int, eps: float = EPS) -> None:
    """Within 16 eps of the largest value for each level of a sum of `terms` rounded terms, in pairs."""
    bar = 16 * eps * max(terms, 2) ** 0.5
    for name, x, y in zip(("loss", "dhidden", "dweight"), found, wanted, strict=True):
        assert x.shape == y.shape, name
        assert not y.numel() or (x - y).abs().max() <= bar * max(y.abs().max().item(), 1.0), name


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether dhidden was made, for every call of the implementation from now on."""
    calls: list[bool] = []

    def count(module: ModuleType) -> None:
        forward = module.cross_entropy_forward

        def counting(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
            calls.append(options["wants_hidden"])
            return forward(*arguments, **options)  # type: ignore[no-any-return]

        monkeypatch.setattr(module, "cross_entropy_forward", counting)

    for module in {loss._kernels(torch.empty(0, dtype=dtype)) for dtype in (torch.float32, torch.float64)}:
        count(module)
    return calls


@pytest.fixture(params=[None, 32, 1], ids=["usual", "32", "1"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Rows of a chunk."""
    if request.param is not None:
        monkeypatch.setattr(reference_loss, "MOST_ROWS", request.param)
    return request.param


@given(
    R=st.integers(0, 70),
    D=st.integers(1, 12),
    V=st.one_of(st.integers(1, 40), st.integers(500, 1100)),
    sets=st.integers(0, 3),
    own=st.booleans(),
    weighted=st.booleans(),
    ignored=st.booleans(),
    label_smoothing=st.sampled_from([0.0, 0.1]),
    z_loss=st.sampled_from([0.0, 0.01]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_equals_pytorch(
    R: int,
    D: int,
    V: int,
    sets: int,
    own: bool,
    weighted: bool,
    ignored: bool,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
) -> None:
    """Float32 too is held against float64, of the same values."""
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    case = make(R, D, V, sets=sets, own=own and sets > 0, weighted=weighted, ignored=ignored, dtype=dtype, **options)
    assert_near(case.gradients(), case.wide().exact(), R * max(sets, 1) + V, torch.finfo(dtype).eps)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("sets", [0, 2])
def test_chunks_change_nothing_but_roundings(sets: int) -> None:
    case = make(67, 6, 23, sets=sets, weighted=True, ignored=True, label_smoothing=0.1, z_loss=0.01)
    assert_near(case.gradients(), case.exact(), 200)


@pytest.mark.parametrize("sets", [0, 2])
@pytest.mark.parametrize("own", [False, True])
def test_gradcheck(sets: int, own: bool) -> None:
    case = make(5, 3, 7, sets=sets, own=own and sets > 0, weighted=True, label_smoothing=0.1, z_loss=0.01)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return dataclasses.replace(case, hidden=hidden, weight=weight).run()

    assert torch.autograd.gradcheck(loss, (case.hidden, case.weight))


@pytest.mark.parametrize("own", [False, True])
def test_sets_equal_calls_of_their_own(own: bool) -> None:
    """Bitwise in losses; gradients also where every set's loss has another factor, and then made anew."""
    case = make(40, 8, 30, sets=3, own=own, weighted=True, ignored=True, z_loss=0.01)
    factors = torch.tensor([0.5, 0.0, -3.0], dtype=torch.float64)
    for dloss in (torch.ones(3, dtype=torch.float64), factors):
        losses, dhidden, dweight = case.gradients(dloss)
        expected = [torch.zeros_like(dhidden), torch.zeros_like(dweight)]
        for index in range(3):
            assert case.weights is not None
            hidden = case.hidden[index] if own else case.hidden
            one = dataclasses.replace(case, hidden=hidden, targets=case.targets[index], weights=case.weights[index])
            loss = one.run()
            assert loss == losses[index]
            for total, gradient in zip(
                expected, torch.autograd.grad(loss, [case.hidden, case.weight], dloss[index]), strict=True
            ):
                total += gradient
        assert_near([losses, dhidden, dweight], [losses, *expected], 120)


def test_summed_losses_use_the_gradients_of_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(9, 4, 7, sets=3)
    calls = count_calls(monkeypatch)
    torch.autograd.grad(case.run().sum() / 7, [case.hidden, case.weight])
    assert calls == [True]
    torch.autograd.grad(case.run() @ torch.arange(3.0, dtype=torch.float64), [case.hidden, case.weight])
    assert calls == [True] * 3


@pytest.mark.parametrize("how", ["ignored", "weight 0"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_rows_that_do_not_count_are_not_looked_at(how: str, value: float) -> None:
    case = make(12, 4, 9, weighted=True, label_smoothing=0.1, z_loss=0.01, dtype=torch.float32)
    assert case.weights is not None
    case.weights += 0.5
    out = torch.tensor([0, 5, 11])
    if how == "ignored":
        case.targets[out] = IGNORED
    else:
        case.weights[out] = 0
    wanted = case.gradients()
    with torch.no_grad():
        case.hidden[out] = value
    found = case.gradients()
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert (found[1][out] == 0).all()


def test_nothing_counts() -> None:
    case = make(6, 4, 9)
    case.targets[:] = IGNORED
    assert all((x == 0).all() for x in case.gradients())


def test_large_logits() -> None:
    """A target 1,500 nats below the largest logit, which no float32 probability can express."""
    hidden, weight = torch.full((2, 1), 1000.0), torch.tensor([[1.0], [-1.0], [0.5]])
    with torch.no_grad():
        assert ops.linear_cross_entropy(hidden, weight, torch.tensor([0, 2])).item() == 500.0
        assert ops.linear_cross_entropy(hidden, weight, torch.tensor([0, 1])).item() == 2000.0


def test_the_same_bits_again_also_from_a_kept_graph() -> None:
    case = make(70, 8, 30, weighted=True, dtype=torch.float32)
    wanted = case.gradients(torch.tensor(1 / 3))
    loss = case.run()
    for kept in (True, True, False):
        again = torch.autograd.grad(loss, [case.hidden, case.weight], torch.tensor(1 / 3), retain_graph=kept)
        assert all(torch.equal(x, y) for x, y in zip(again, wanted[1:], strict=True))


def test_gradients_add_up_over_micro_batches() -> None:
    whole, terms = make(60, 5, 11, weighted=True), 60
    whole.run().mul(0.25).backward()
    wanted = whole.weight.grad
    assert wanted is not None
    whole.weight.grad = None
    for start in range(0, 60, 20):
        rows = slice(start, start + 20)
        assert whole.weights is not None
        hidden = whole.hidden.detach()[rows].requires_grad_()
        part = dataclasses.replace(whole, hidden=hidden, targets=whole.targets[rows], weights=whole.weights[rows])
        part.run().mul(0.25).backward()
    found = whole.weight.grad
    assert found is not None
    assert (found - wanted).abs().max() <= 16 * EPS * terms**0.5 * wanted.abs().max()


def test_only_wanted_gradients_are_made() -> None:
    case = make(9, 4, 7, dtype=torch.float32)
    wanted = case.gradients()
    for index, name in ((1, "hidden"), (2, "weight")):
        other = "weight" if name == "hidden" else "hidden"
        one = dataclasses.replace(case, **{other: getattr(case, other).detach()})
        (gradient,) = torch.autograd.grad(one.run(), getattr(one, name))
        assert torch.equal(gradient, wanted[index])
    with torch.no_grad():
        loss = case.run()
    assert not loss.requires_grad
    assert torch.equal(loss, wanted[0])


def test_the_backward_pass_takes_no_second_gradient_of_the_weight() -> None:
    """What was made is scaled in place and handed out, to become `.grad` without a copy."""
    case = make(9, 64, 5000, dtype=torch.float32)
    loss = case.run() / 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss.backward()
    taken = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    assert taken < case.weight.numel()  # a quarter of its bytes
    assert case.weight.grad is not None


@pytest.mark.parametrize("wide_weight", [True, False])
def test_autocast_multiplies_in_bfloat16_and_adds_in_float32(wide_weight: bool) -> None:
    """Errors: logits, dlogits and the gradients' last rounding of 2^-9 each, over a sum that averages them out."""
    case = make(300, 16, 40, dtype=torch.float32)
    if not wide_weight:
        case.weight = case.weight.detach().bfloat16().requires_grad_()
    exact = dataclasses.replace(
        case,
        hidden=case.hidden.detach().double().requires_grad_(),
        weight=case.weight.detach().double().requires_grad_(),
    ).exact()
    with torch.autocast("cpu", torch.bfloat16):
        found = case.gradients()
    assert [x.dtype for x in found] == [torch.float32, torch.float32, case.weight.dtype]
    for x, y, bar in zip(found, exact, (2e-3, 6e-3, 6e-3), strict=True):
        assert (x.double() - y).norm() <= bar * y.norm()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_an_attached_weight_is_read_as_its_copy_and_its_gradient_added_to_the_sum(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same loss and dhidden, and dweight up to the rounding of a product that is now fused with the sum, added up
    over micro-batches."""
    monkeypatch.setenv("CDRMIX_BACKEND", backend)
    case = make(40, 16, 30, weighted=True, dtype=torch.float32)
    assert case.weights is not None
    with torch.autocast("cpu", torch.bfloat16):
        loss, dhidden, dweight = case.gradients()
        weights.attach([case.weight], torch.bfloat16, add_gradients=True)
        returned = []
        case.weight.register_hook(returned.append)
        for count in (1, 2):
            found = case.run()
            found.backward()
            assert case.hidden.grad is not None
            assert case.weight.grad is not None
            assert torch.equal(found, loss)
            assert torch.equal(case.hidden.grad, count * dhidden)
            torch.testing.assert_close(case.weight.grad, count * dweight, rtol=2**-22, atol=1e-9)
        with torch.no_grad():
            weights.compute_weight(case.weight, torch.bfloat16).zero_()  # what the loss reads
        flat = case.run().detach() / case.weights.sum()
    torch.testing.assert_close(flat, torch.tensor(30.0).log())
    assert all(gradient is None for gradient in returned)


def test_strided_inputs() -> None:
    case = make(20, 6, 11, sets=2, weighted=True, dtype=torch.float32)
    assert case.weights is not None
    wanted = case.gradients()
    strided = Case(
        case.hidden.detach().mT.contiguous().mT.requires_grad_(),
        torch.cat([case.weight.detach()] * 2, -1)[:, :6].requires_grad_(),
        case.targets.mT.contiguous().mT,
        case.weights.mT.contiguous().mT,
        {},
    )
    assert all(torch.equal(x, y) for x, y in zip(strided.gradients(), wanted, strict=True))


@pytest.mark.parametrize("sets", [0, 2])
def test_the_operator_is_registered_as_it_behaves(sets: int) -> None:
    case = make(9, 4, 7, sets=sets, weighted=True, dtype=torch.float32)
    options = 0.01, 0.1, IGNORED, torch.float32, True, True
    torch.library.opcheck(
        torch.ops.cdrmix.linear_cross_entropy.default, (case.hidden, case.weight, case.targets, case.weights, *options)
    )


@pytest.mark.parametrize("sets", [0, 2])
def test_compiles_in_one_graph_and_makes_gradients_once(sets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(9, 4, 7, sets=sets, weighted=True, dtype=torch.float32)

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return dataclasses.replace(case, hidden=hidden, weight=weight).run().sum() / 3

    leaves = [case.hidden, case.weight]
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    calls = count_calls(monkeypatch)
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves), leaves)
    assert calls == [True]
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("scale", [1.0, 2.0**-16, 2.0**-40])
def test_small_weights_lose_nothing_in_float16(scale: float) -> None:
    """A mean's weights, with a loss scale behind: 2^-24 is the least that float16 holds, and 2^-40 none of its bits."""
    case = make(64, 16, 200, dtype=torch.float16)
    weights = torch.full((64,), scale)
    found = dataclasses.replace(case, weights=weights).gradients(torch.tensor(1 / scale))
    hidden, weight = (x.detach().double().requires_grad_() for x in (case.hidden, case.weight))
    exact = Case(hidden, weight, case.targets, None, {}).exact()
    for x, y in zip(found[1:], exact[1:], strict=True):
        assert (x.double() - y).norm() <= 2e-3 * y.norm()  # a rounding of logits and one of p, each 5e-4


@pytest.mark.parametrize("sets", [0, 2])
def test_powers_of_two_in_the_weights_change_no_bit(sets: int) -> None:
    case = make(40, 8, 30, sets=sets, weighted=True, dtype=torch.float32)
    small = dataclasses.replace(case, weights=case.weights * 2.0**-30).gradients()
    assert all(torch.equal(x * 2.0**30, y) for x, y in zip(small, case.gradients(), strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": None}, "hidden must be a torch.Tensor; found NoneType"),
        ({"hidden": torch.zeros(5)}, r"hidden must be \[R, D\] or \[S, R, D\] with D at least 1; found \[5\]"),
        ({"hidden": torch.zeros(5, 4, dtype=torch.int64)}, "hidden is torch.int64; allowed are bfloat16"),
        ({"weight": torch.zeros(7, 3)}, r"weight must be \[V, D\], D = 4 as of hidden.*found \[7, 3\]"),
        ({"weight": torch.zeros(0, 4)}, "V at least 1"),
        ({"weight": torch.zeros(7, 4, device="meta")}, "weight is on meta, but hidden is on cpu"),
        ({"targets": torch.zeros(5)}, "targets are torch.float32; they must be int64"),
        ({"targets": torch.zeros(4, dtype=torch.int64)}, r"found \[4\] for \[5, 4\]"),
        ({"targets": torch.zeros(0, 5, dtype=torch.int64)}, r"S at least 1; found \[0, 5\]"),
        ({"hidden": torch.zeros(2, 5, 4)}, r"found \[5\] for \[2, 5, 4\]"),
        ({"targets": torch.tensor([0, 1, 7, 2, 3])}, r"lie in \[0, 7\) or be ignore_index=-100; found 7 at \[2\]"),
        ({"targets": torch.tensor([0, 1, -1, 2, 3])}, "found -1"),
        ({"weights": torch.ones(4)}, r"weights must be floating point and \[5\] as the targets; found .* \[4\]"),
        ({"weights": torch.ones(5, dtype=torch.int64)}, "found torch.int64"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0; choose at least 0 and less than 1"),
        ({"z_loss": None}, "z_loss must be a number; found NoneType"),
        ({"ignore_index": 1.5}, "ignore_index must be an integer; found 1.5"),
        ({"z_loss": -1.0}, "z_loss=-1.0; choose a finite factor of at least 0"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    right = {"hidden": torch.zeros(5, 4), "weight": torch.zeros(7, 4), "targets": torch.arange(5)}
    with pytest.raises(ValueError, match=message):
        ops.linear_cross_entropy(**(right | changes))


def test_ignore_index_is_chosen_freely() -> None:
    case = make(9, 4, 7)
    at_three = dataclasses.replace(case, options={"ignore_index": 3}).run()
    usual = dataclasses.replace(case, targets=case.targets.where(case.targets != 3, IGNORED)).run()
    assert at_three == usual
