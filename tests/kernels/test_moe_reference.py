"""Routing and experts against a loop over tokens, in float64, forward and every gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from cdrmix import ops

CLOSE = {"rtol": 1e-11, "atol": 1e-12}  # float64 products over at most 7 terms


def experts_by_hand(x_TD: Tensor, w_up: Tensor, w_down: Tensor, routing: ops.Routing, activation: str) -> Tensor:
    """One token and one choice at a time."""
    rows = []
    for token, (weights, experts) in enumerate(zip(routing.weights_TK, routing.experts_TK.tolist(), strict=True)):
        total = torch.zeros_like(x_TD[0])
        for weight, expert in zip(weights, experts, strict=True):
            z = x_TD[token] @ w_up[expert]
            if activation == "relu2":
                hidden = functional.relu(z) ** 2
            else:
                gate, up = z[0::2], z[1::2]
                hidden = functional.silu(gate) * up
            total = total + weight * (hidden @ w_down[expert])
        rows.append(total)
    return torch.stack(rows)


@given(
    seed=st.integers(0, 10**6),
    tokens=st.integers(1, 17),
    experts=st.integers(1, 5),
    k=st.integers(1, 3),
    activation=st.sampled_from(["relu2", "swiglu"]),
    skew=st.booleans(),
)
def test_experts_equal_a_loop_over_tokens(
    seed: int, tokens: int, experts: int, k: int, activation: str, skew: bool
) -> None:
    k = min(k, experts)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    width, hidden = 5, 7
    x, logits = normal(tokens, width), normal(tokens, experts)
    if skew:  # everything to the first k experts: the others stay empty
        logits.data -= torch.arange(experts) * 100.0
    w_up, w_down = normal(experts, width, hidden * (2 if activation == "swiglu" else 1)), normal(experts, hidden, width)
    routing = ops.route_topk(logits, k)
    found = ops.moe_experts(x, w_up, w_down, routing, activation=activation)
    expected = experts_by_hand(x, w_up, w_down, routing, activation)
    torch.testing.assert_close(found, expected, **CLOSE)
    weight = torch.randn_like(expected)
    inputs = [x, logits, w_up, w_down]
    wanted = torch.autograd.grad((expected * weight).sum(), inputs, retain_graph=True)
    for left, right in zip(torch.autograd.grad((found * weight).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(left, right, **CLOSE)


def test_an_empty_expert_has_a_gradient_of_zero() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    logits = torch.tensor([[3.0, 1.0, -9.0]], dtype=torch.float64).repeat(4, 1)
    w_up = torch.randn(3, 3, 2, dtype=torch.float64, requires_grad=True)
    w_down = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
    ops.moe_experts(x, w_up, w_down, ops.route_topk(logits, 2)).sum().backward()
    assert w_up.grad is not None
    assert w_down.grad is not None
    assert torch.equal(w_up.grad[2], torch.zeros(3, 2, dtype=torch.float64))
    assert torch.equal(w_down.grad[2], torch.zeros(2, 3, dtype=torch.float64))


def test_routing_statistics_and_order() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0], [5.0, 5.0, 5.0, 5.0], [0.0, 0.0, 3.0, 4.0]], dtype=torch.float64)
    routing = ops.route_topk(logits, 2)
    assert routing.experts_TK.tolist() == [[1, 2], [0, 1], [3, 2]]  # ties go to the lowest index
    assert routing.counts_E.tolist() == [1, 2, 2, 1]
    assert routing.order_R.tolist() == [2, 0, 3, 1, 5, 4]  # stable: by expert, then by token
    probabilities = logits.softmax(-1)
    share = torch.tensor([1, 2, 2, 1], dtype=torch.float64) / 6
    torch.testing.assert_close(routing.load_balance, 4 * (share * probabilities.mean(0)).sum())
    torch.testing.assert_close(routing.z_loss, logits.logsumexp(-1).square().mean())
    torch.testing.assert_close(routing.weights_TK.sum(-1), torch.ones(3, dtype=torch.float64))


def test_a_selection_bias_changes_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
    routing = ops.route_topk(logits, 2, bias=torch.tensor([-10.0, 0.0, 0.0], dtype=torch.float64))
    assert routing.experts_TK.tolist() == [[1, 2]]
    torch.testing.assert_close(routing.weights_TK, logits[:, 1:].softmax(-1))


def test_gradcheck_of_routing_and_experts() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    gate = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    w_up = torch.randn(4, 3, 4, dtype=torch.float64, requires_grad=True)
    w_down = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)

    def layer(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, gate, w_up, w_down = tensors
        routing = ops.route_topk(x @ gate.mT, 2)
        y = ops.moe_experts(x, w_up, w_down, routing, activation="swiglu")
        return y, routing.load_balance, routing.z_loss

    assert torch.autograd.gradcheck(layer, (x, gate, w_up, w_down))


@pytest.mark.parametrize("rows", [1, 511, 512, 1100])
def test_linear_cross_entropy_equals_pytorch(rows: int) -> None:
    torch.manual_seed(1)
    hidden = torch.randn(rows, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    targets, weights = torch.randint(0, 11, (rows,)), torch.rand(rows, dtype=torch.float64)
    expected = (functional.cross_entropy(hidden @ weight.mT, targets, reduction="none") * weights).sum()
    found = ops.linear_cross_entropy(hidden, weight, targets, weights)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(expected * 0.5, [hidden, weight])
    for left, right in zip(torch.autograd.grad(found * 0.5, [hidden, weight]), wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-12)


def test_linear_cross_entropy_without_gradients_and_with_large_logits() -> None:
    hidden, weight = torch.full((2, 1), 1000.0), torch.tensor([[1.0], [-1.0], [0.5]])
    with torch.no_grad():
        loss = ops.linear_cross_entropy(hidden, weight, torch.tensor([0, 2]), torch.ones(2))
    assert math.isclose(loss.item(), 500.0, rel_tol=1e-6)


def test_token_shift_takes_the_predecessor_and_zero_at_a_document_start() -> None:
    x = torch.arange(1.0, 7.0).view(1, 6, 1)
    starts = torch.tensor([False, False, True, False, False, False]).view(1, 6, 1)
    assert ops.token_shift(x, None, starts).flatten().tolist() == [0, 1, 0, 3, 4, 5]
    assert ops.token_shift(x, torch.tensor([[9.0]])).flatten().tolist() == [9, 1, 2, 3, 4, 5]


def test_gradcheck_of_token_shift() -> None:
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    last = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    starts = torch.tensor([[True, False, True, False, False], [False, False, False, False, True]]).unsqueeze(-1)
    assert torch.autograd.gradcheck(ops.token_shift, (x, last))
    assert torch.autograd.gradcheck(ops.token_shift, (x, last, starts))
    assert torch.autograd.gradcheck(ops.token_shift, (x,))
