"""The mixture of experts through cdrmix.ops, on every implementation: against loops in float64, and to the bit."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from cdrmix import ops
from cdrmix.errors import NonFiniteLossError
from cdrmix.kernels.moe import reference as reference_moe

# Root-mean-square error over the root-mean-square value, against float64. float32 carries 6e-8 an operation; sums of
# up to 90 products go through four products in a row. The logits' gradients are differences of a token's weights'
# gradients: with one token alone they may be a tenth of those.
BAR, BAR_OF_DIFFERENCES = 2e-6, 2e-5
GRADIENTS = ("x", "logits", "w_up", "w_down")


GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@dataclasses.dataclass
class Case:
    """A whole layer's inputs, float64 on the CPU, rounded to float32 so that everybody is asked the same question."""

    tokens: int
    experts: int
    k: int
    activation: str = "relu2"
    capacity: int | None = None
    favourite: float = 0.0  # added to the logits, falling with the expert's number
    seed: int = 0
    width: int = 16
    hidden: int = 24

    def inputs(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        columns = self.hidden * (2 if self.activation == "swiglu" else 1)
        shapes = {
            "x": (self.tokens, self.width),
            "logits": (self.tokens, self.experts),
            "w_up": (self.experts, self.width, columns),
            "w_down": (self.experts, self.hidden, self.width),
            "dy": (self.tokens, self.width),
        }
        values = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
        values["w_up"] *= self.width**-0.5
        values["w_down"] *= self.hidden**-0.5
        values["logits"] -= self.favourite * torch.arange(self.experts)
        return {name: value.double() for name, value in values.items()}

    def exact(self) -> dict[str, Tensor]:
        """Outputs and gradients of one token and one choice at a time, in float64."""
        x = {name: value.requires_grad_() for name, value in self.inputs().items()}
        probabilities, log_sums = x["logits"].softmax(-1), x["logits"].logsumexp(-1)
        taken, tokens_per_expert = [0] * self.experts, [0] * self.experts
        rows = []
        for token, scores in enumerate(x["logits"].tolist()):
            chosen = sorted(range(self.experts), key=lambda expert: (-scores[expert], expert))[: self.k]
            total = torch.zeros_like(x["x"][0])
            for expert in chosen:
                tokens_per_expert[expert] += 1
                if self.capacity is None or taken[expert] < self.capacity:
                    taken[expert] += 1
                    z = x["x"][token] @ x["w_up"][expert]
                    hidden = z.relu() ** 2 if self.activation == "relu2" else functional.silu(z[0::2]) * z[1::2]
                    weight = probabilities[token, expert] / probabilities[token, chosen].sum()
                    total = total + weight * (hidden @ x["w_down"][expert])
            rows.append(total)
        share = torch.tensor(tokens_per_expert, dtype=torch.float64) / max(self.tokens * self.k, 1)
        return self._differentiated(
            x, torch.stack(rows), self.experts * (share * probabilities.mean(0)).sum(), log_sums.square().mean()
        )

    def found(self, device: str, dtype: torch.dtype = torch.float32, recompute: bool = False) -> dict[str, Tensor]:
        """The same of the implementation that the environment names."""
        x = {name: value.to(device, dtype).requires_grad_() for name, value in self.inputs().items()}
        routing = ops.route_topk(x["logits"], self.k, capacity=self.capacity)
        y = ops.moe_experts(x["x"], x["w_up"], x["w_down"], routing, activation=self.activation, recompute=recompute)
        return self._differentiated(x, y, routing.load_balance, routing.z_loss)

    def _differentiated(self, x: dict[str, Tensor], *outputs: Tensor) -> dict[str, Tensor]:
        y, load_balance, z_loss = outputs
        total = (y * x["dy"].detach()).sum() + 3 * load_balance + 0.5 * z_loss
        gradients = torch.autograd.grad(total, [x[name] for name in GRADIENTS], materialize_grads=True)
        names = ("y", "load_balance", "z_loss", *(f"d{name}" for name in GRADIENTS))
        named = dict(zip(names, (*outputs, *gradients), strict=True))
        return {name: value.detach().cpu() for name, value in named.items()}


def check(found: dict[str, Tensor], exact: dict[str, Tensor], bar: float = BAR) -> None:
    for name, wanted in exact.items():
        scale = max(wanted.square().mean().sqrt().item(), 1e-3)
        error = (found[name].double() - wanted).square().mean().sqrt().item()
        allowed = max(bar, BAR_OF_DIFFERENCES) if name == "dlogits" and bar == BAR else bar
        assert error <= allowed * scale, f"{name}: {error / scale:.2e}"


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name in left:
        assert torch.equal(left[name], right[name]), name


def routing_of(case: Case, device: str) -> ops.Routing:
    return ops.route_topk(case.inputs()["logits"].float().to(device), case.k, capacity=case.capacity)


@pytest.mark.parametrize(
    "where", ["cpu", "reference", pytest.param("triton", marks=pytest.mark.slow), GPU], indirect=True, scope="module"
)
@given(
    tokens=st.integers(1, 40),
    experts=st.integers(1, 16),
    k=st.integers(1, 4),
    activation=st.sampled_from(["relu2", "swiglu"]),
    capacity=st.none() | st.integers(0, 20),
    favourite=st.sampled_from([0.0, 0.5, 50.0]),
    recompute=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_outputs_and_all_gradients_equal_a_loop_in_float64(
    device: str,
    tokens: int,
    experts: int,
    k: int,
    activation: str,
    capacity: int | None,
    favourite: float,
    recompute: bool,
    seed: int,
) -> None:
    case = Case(tokens, experts, min(k, experts), activation, capacity, favourite, seed)
    check(case.found(device, recompute=recompute), case.exact())


CASES = {
    "one token": Case(1, 4, 2),
    "all to the first": Case(37, 4, 1, favourite=100.0),
    "empty experts": Case(33, 8, 2, "swiglu", favourite=100.0),
    "sixteen experts": Case(70, 16, 2, "swiglu"),
    "every expert": Case(19, 3, 3),
    "capacity": Case(50, 4, 2, "swiglu", capacity=13),
    "no capacity at all": Case(9, 4, 2, capacity=0),
}


@pytest.mark.parametrize("name", CASES)
def test_special_loads(where: str, device: str, name: str) -> None:
    case = CASES[name]
    found = case.found(device)
    check(found, case.exact())
    if where != "triton":  # its interpreter is numpy in one thread; repeats are in test_moe_triton.py
        same(found, case.found(device))  # the same bits every time
    check(case.found(device, recompute=True), case.exact())


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_float64_is_exact_to_float64(activation: str) -> None:
    case = Case(23, 5, 3, activation, capacity=11)
    check(case.found("cpu", torch.float64), case.exact(), 1e-12)


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_bfloat16_is_near_float64(monkeypatch: pytest.MonkeyPatch, backend: str, activation: str) -> None:
    """Rounding to nearest is 2^-9 / sqrt(3) = 1.1e-3, and up to six rounded tensors lie on the way to a result.

    The gradient of the logits is the difference of a token's weights' gradients, so its errors stand out.
    """
    monkeypatch.setenv("CDRMIX_BACKEND", backend)
    case = Case(60, 4, 2, activation)
    found, exact = case.found("cpu", torch.bfloat16), case.exact()
    choices = case.inputs()["logits"]
    if torch.equal(choices.bfloat16().double().topk(2).indices, choices.topk(2).indices):
        check(found, {name: value for name, value in exact.items() if name != "dlogits"}, 2e-2)
    assert found["y"].dtype == torch.bfloat16


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("capacity", [None, 9])
def test_grouped_products_equal_the_loop(
    monkeypatch: pytest.MonkeyPatch, activation: str, capacity: int | None
) -> None:
    """torch._grouped_mm, of CUDA and of bfloat16 on CPUs: an expert and a tail without rows, Z kept or not."""
    case = Case(37, 4, 2, activation, capacity, favourite=2.0)
    expected = case.exact()
    monkeypatch.setenv("CDRMIX_BACKEND", "reference")
    monkeypatch.setattr(reference_moe, "_has_grouped_product", lambda *_: True)
    for recompute in (False, True):
        check(case.found("cpu", recompute=recompute), expected)
    empty = Case(20, 6, 1, activation, favourite=100.0)
    check(empty.found("cpu"), empty.exact())


def test_the_routing_of_known_logits(device: str) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0], [5.0, 5.0, 5.0, 5.0], [0.0, 0.0, 3.0, 4.0]], device=device)
    routing = ops.route_topk(logits, 2)
    assert routing.experts_TK.tolist() == [[1, 2], [0, 1], [3, 2]]  # ties go to the lowest index
    assert routing.counts_E.tolist() == routing.tokens_per_expert_E.tolist() == [1, 2, 2, 1]
    assert routing.order_R.tolist() == [2, 0, 3, 1, 5, 4]  # stable: by expert, then by token
    probabilities = logits.softmax(-1)
    share = torch.tensor([1, 2, 2, 1], device=device) / 6
    torch.testing.assert_close(routing.load_balance, 4 * (share * probabilities.mean(0)).sum())
    torch.testing.assert_close(routing.z_loss, logits.logsumexp(-1).square().mean())
    torch.testing.assert_close(routing.weights_TK.sum(-1), torch.ones(3, device=device))
    assert {x.dtype for x in (routing.experts_TK, routing.counts_E, routing.tokens_per_expert_E, routing.order_R)} == {
        torch.int64
    }


def test_a_capacity_keeps_the_first_routes_and_drops_the_others_in_order(device: str) -> None:
    logits = torch.tensor([[3.0, 2.0, 0.0], [3.0, 0.0, 2.0], [3.0, 2.0, 0.0]], device=device)
    routing = ops.route_topk(logits, 2, capacity=1)
    assert routing.tokens_per_expert_E.tolist() == [3, 2, 1]
    assert routing.counts_E.tolist() == [1, 1, 1]
    assert routing.order_R.tolist() == [0, 1, 3, 2, 4, 5]
    expected = logits.gather(1, routing.experts_TK).softmax(-1)
    torch.testing.assert_close(routing.weights_TK, expected)  # a dropped expert's weight is not given to the others
    unbound = ops.route_topk(logits, 2)
    assert torch.equal(routing.load_balance, unbound.load_balance)


def test_dropped_routes_have_no_gradient(device: str) -> None:
    inputs = {name: x.float().to(device).requires_grad_() for name, x in Case(9, 4, 2).inputs().items()}
    routing = ops.route_topk(inputs["logits"], 2, capacity=2)
    weights = routing.weights_TK.detach().requires_grad_()
    y = ops.moe_experts(inputs["x"], inputs["w_up"], inputs["w_down"], dataclasses.replace(routing, weights_TK=weights))
    (dweights,) = torch.autograd.grad((y * inputs["dy"]).sum(), weights)
    kept = int(routing.counts_E.sum())
    assert torch.equal(dweights.flatten()[routing.order_R[kept:]], torch.zeros(18 - kept, device=device))
    assert (dweights.flatten()[routing.order_R[:kept]] != 0).all()


def test_a_selection_bias_changes_the_choice_and_not_the_weights(device: str) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], device=device, requires_grad=True)
    bias = torch.tensor([-10.0, 0.0, 0.0], device=device, requires_grad=True)
    routing = ops.route_topk(logits, 2, bias=bias)
    assert routing.experts_TK.tolist() == [[1, 2]]
    torch.testing.assert_close(routing.weights_TK, logits[:, 1:].softmax(-1))
    routing.weights_TK[0, 0].backward()
    assert bias.grad is None


@pytest.mark.parametrize("capacity", [None, 13])
def test_dispatch_and_combine_are_adjoint_and_give_k_times_x(device: str, capacity: int | None) -> None:
    case = Case(41, 5, 3, capacity=capacity)
    routing = routing_of(case, device)
    x, y = torch.randn(41, 24, device=device, requires_grad=True), torch.randn(123, 24, device=device)
    x_RD = ops.moe_dispatch(x, routing)
    kept = int(routing.counts_E.sum())
    assert torch.equal(x_RD[:kept], x[routing.order_R[:kept] // 3])
    assert not x_RD[kept:].any()
    if capacity is None:
        torch.testing.assert_close(ops.moe_combine(x_RD, routing), 3 * x)
    y[kept:] = torch.nan  # what stands where no expert has written
    y.requires_grad_()
    combined = ops.moe_combine(y, routing)
    (dx,) = torch.autograd.grad(x_RD, x, y.detach())
    assert torch.equal(dx, combined)
    (dy,) = torch.autograd.grad(combined, y, x.detach())
    assert torch.equal(dy, x_RD)


def test_relabelled_experts_change_nothing(device: str) -> None:
    case, names = Case(45, 6, 2, "swiglu"), torch.tensor([3, 0, 5, 1, 4, 2])
    original = case.found(device)
    relabelled = case.inputs()
    for name in ("w_up", "w_down"):
        relabelled[name] = relabelled[name][names]
    relabelled["logits"] = relabelled["logits"][:, names]
    changed = replaced(case, relabelled).found(device)
    for name in ("dw_up", "dw_down"):
        original[name] = original[name][names]
    original["dlogits"] = original["dlogits"][:, names]
    check(changed, original, 2e-7)  # a softmax over another order of experts rounds otherwise
    assert torch.equal(changed["dw_up"] != 0, original["dw_up"] != 0)


def test_permuted_tokens_give_permuted_outputs_to_the_bit(device: str) -> None:
    case, places = Case(45, 6, 3), torch.randperm(45, generator=torch.Generator().manual_seed(1))
    original = case.found(device)
    permuted = replaced(case, {name: x if name[0] == "w" else x[places] for name, x in case.inputs().items()})
    found = permuted.found(device)
    original = {name: value[places] for name, value in original.items() if name in ("y", "dx", "dlogits")}
    if device == "cpu" and os.environ["CDRMIX_BACKEND"] == "triton":
        check(found, original)  # in the interpreter a product is numpy's, whose rows depend on their places
    else:
        same(original, found)


def replaced(case: Case, inputs: dict[str, Tensor]) -> Case:
    """The case with other inputs."""

    class Replaced(Case):
        def inputs(self) -> dict[str, Tensor]:
            return {name: value.clone() for name, value in inputs.items()}

    return Replaced(**dataclasses.asdict(case))


def test_no_tokens_give_nothing_and_gradients_of_zero(device: str) -> None:
    """As on a rank of expert parallelism that none were routed to."""
    x = {name: value.float().to(device).requires_grad_() for name, value in Case(0, 4, 2).inputs().items()}
    routing = ops.route_topk(x["logits"], 2)
    y = ops.moe_combine(ops.moe_dispatch(x["x"], routing), routing)
    y = y + ops.moe_experts(x["x"], x["w_up"], x["w_down"], routing)
    assert y.shape == (0, 16)
    gradients = torch.autograd.grad(y.sum() + routing.load_balance + routing.z_loss, [x[name] for name in GRADIENTS])
    assert routing.z_loss == routing.load_balance == 0
    assert not any(gradient.any() for gradient in gradients)


def test_only_wanted_gradients_come(device: str) -> None:
    x = {name: value.float().to(device) for name, value in Case(12, 4, 2).inputs().items()}
    x["w_up"].requires_grad_()
    y = ops.moe_experts(x["x"], x["w_up"], x["w_down"], ops.route_topk(x["logits"], 2))
    y.sum().backward()
    assert x["w_up"].grad is not None
    assert x["x"].grad is None


def test_without_gradients_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", "reference")
    seen = []
    forward = reference_moe.experts_forward

    def watched(*tensors: Tensor, activation: str, recompute: bool) -> tuple[Tensor, Tensor]:
        seen.append(recompute)
        return forward(*tensors, activation=activation, recompute=recompute)

    monkeypatch.setattr(reference_moe, "experts_forward", watched)
    x = {name: value.float() for name, value in Case(12, 4, 2).inputs().items()}
    ops.moe_experts(x["x"], x["w_up"], x["w_down"], ops.route_topk(x["logits"], 2))
    x["x"].requires_grad_()
    with torch.no_grad():
        ops.moe_experts(x["x"], x["w_up"], x["w_down"], ops.route_topk(x["logits"], 2))
    ops.moe_experts(x["x"], x["w_up"], x["w_down"], ops.route_topk(x["logits"], 2))
    assert seen == [True, True, False]


def test_gradcheck_of_routing_and_experts() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    gate = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    w_up = torch.randn(4, 3, 4, dtype=torch.float64, requires_grad=True)
    w_down = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)

    def layer(*tensors: Tensor) -> tuple[Tensor, ...]:
        x, gate, w_up, w_down = tensors
        routing = ops.route_topk(x @ gate.mT, 2, capacity=3)
        y = ops.moe_experts(x, w_up, w_down, routing, activation="swiglu")
        rows = ops.moe_combine(ops.moe_dispatch(x, routing), routing)
        return y, rows, routing.load_balance, routing.z_loss

    assert torch.autograd.gradcheck(layer, (x, gate, w_up, w_down))


def test_autocast_says_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDRMIX_BACKEND", "cpu")
    x = {name: value.float().requires_grad_() for name, value in Case(20, 4, 2).inputs().items()}
    with torch.autocast("cpu", torch.bfloat16):
        routing = ops.route_topk(x["logits"], 2)
        y = ops.moe_experts(x["x"], x["w_up"], x["w_down"], routing)
    assert (y.dtype, routing.weights_TK.dtype) == (torch.bfloat16, torch.float32)
    gradients = torch.autograd.grad(y.float().sum(), [x["x"], x["w_up"]])
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


def layer_of(change: dict[str, Any]) -> None:
    """A layer's call with some of its arguments changed."""
    x: dict[str, Any] = {name: value.float() for name, value in Case(10, 4, 2).inputs().items()} | {"k": 2}
    x |= {name: value for name, value in change.items() if name in x}
    routing = ops.route_topk(x["logits"], x["k"], bias=change.get("bias"), capacity=change.get("capacity"))
    routing = dataclasses.replace(routing, **{name: value for name, value in change.items() if hasattr(routing, name)})
    options = {name: value for name, value in change.items() if name in ("activation", "recompute")}
    ops.moe_experts(x["x"], x["w_up"], x["w_down"], routing, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 5}, "k=5, but there are 4 experts: choose 1 to 4"),
        ({"k": 0}, "choose 1 to 4"),
        ({"logits": torch.zeros(4)}, r"logits must be a tensor \[T, E\]"),
        ({"logits": torch.zeros(10, 4, dtype=torch.int64)}, "logits are torch.int64"),
        ({"logits": torch.zeros(9, 4)}, "x has 10 tokens, but the routing's weights are"),
        ({"logits": torch.zeros(10, 5)}, "there are 4 experts, but the routing is for 5"),
        ({"bias": torch.zeros(3)}, r"bias must be \[4\]"),
        ({"capacity": -1}, "capacity=-1"),
        ({"activation": "gelu"}, "choose 'relu2' or 'swiglu'"),
        ({"recompute": "min"}, "recompute must be True or False; found 'min'"),
        ({"activation": "swiglu"}, r"w_up must be \[E, 16, 2F\]"),
        ({"w_up": torch.zeros(4, 15, 24)}, r"w_up must be \[E, 16, F\]"),
        ({"w_down": torch.zeros(3, 24, 16)}, "w_up must be"),
        ({"w_down": torch.zeros(24, 16)}, r"w_down must be \[E, F, D\]; found \[24, 16\]"),
        ({"w_down": torch.zeros(4, 24, 16).double()}, "w_down is torch.float64, but x is torch.float32"),
        ({"x": torch.zeros(10, 16, device="meta")}, "is on cpu, but x is on meta"),
        ({"experts_TK": torch.full((10, 2), 4)}, "experts_TK must be within 0 to 3; found 4 to 4"),
        ({"order_R": torch.full((20,), -1)}, "order_R must be within 0 to 19; found -1 to -1"),
        ({"counts_E": torch.full((4,), 6)}, "counts_E must be 0 or more and sum to at most 20"),
        ({"order_R": torch.zeros(20, dtype=torch.int32)}, "routing.order_R is torch.int32"),
    ],
)
def test_bad_input_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer_of(change)


def test_other_things_than_tensors_and_routings_are_refused() -> None:
    x, w = torch.zeros(10, 3), torch.zeros(4, 3, 3)
    with pytest.raises(ValueError, match=r"moe_experts: routing must be what route_topk gives; found NoneType"):
        ops.moe_experts(x, w, w, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"moe_dispatch: the rows must be a torch.Tensor; found list"):
        ops.moe_dispatch([], routing_of(Case(10, 4, 2), "cpu"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"bias must be a torch.Tensor or None; found list"):
        ops.route_topk(torch.zeros(10, 4), 2, bias=[0.0] * 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"k=True, but there are 4 experts"):
        ops.route_topk(torch.zeros(10, 4), True)
    assert ops.route_topk(torch.zeros(10, 4), 2, capacity=2**70).counts_E.sum() == 20  # more than there are


def test_bad_rows_are_refused() -> None:
    routing = routing_of(Case(10, 4, 2), "cpu")
    with pytest.raises(ValueError, match=r"moe_dispatch: this routing has T = 10 rows, D wide; found \[20, 3\]"):
        ops.moe_dispatch(torch.zeros(20, 3), routing)
    with pytest.raises(
        ValueError, match=r"moe_combine: this routing has R = T \* k = 20 rows, D wide; found \[10, 3\]"
    ):
        ops.moe_combine(torch.zeros(10, 3), routing)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_logits_are_named_with_their_layer(bad: float) -> None:
    logits = torch.zeros(5, 4)
    logits[3, 1] = bad
    with pytest.raises(
        ValueError, match=r"logits of blocks\.7 hold NaN or .*, for 1 of 5 tokens, first token 3"
    ) as caught:
        ops.route_topk(logits, 2, name="blocks.7")
    assert isinstance(caught.value, NonFiniteLossError)  # so that training ends as it does for a loss of NaN
