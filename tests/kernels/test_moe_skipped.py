"""Routing with skipped tokens through cdrmix.ops, on every implementation: against the kept tokens alone."""

from __future__ import annotations

import pytest
import torch

from cdrmix import ops


@pytest.mark.parametrize("capacity", [None, 3])
def test_skipped_tokens_are_routed_nowhere(device: str, capacity: int | None) -> None:
    """As the kept tokens alone: counts, losses, order, outputs and gradients of the logits."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (20, 16), "logits": (20, 4), "w_up": (4, 16, 24), "w_down": (4, 24, 16), "dy": (20, 16)}
    inputs = {name: torch.randn(*shape, generator=generator).double().to(device) for name, shape in shapes.items()}
    keep = torch.rand(20, generator=torch.Generator().manual_seed(1)).to(device) < 0.6
    numbers = keep.nonzero().squeeze(1)
    gradients = []
    for rows, mask in ((torch.arange(20, device=device), keep), (numbers, None)):
        logits = inputs["logits"].clone().requires_grad_()
        routing = ops.route_topk(logits[rows], 2, keep=mask, capacity=capacity)
        y = ops.moe_experts(inputs["x"][rows], inputs["w_up"], inputs["w_down"], routing)
        ((y * inputs["dy"][rows]).sum() + routing.load_balance + routing.z_loss).backward()
        gradients.append((logits.grad, routing, y))
    (masked, routing, y), (alone, wanted, wanted_y) = gradients
    for name in ("counts_E", "tokens_per_expert_E"):
        assert torch.equal(getattr(routing, name), getattr(wanted, name))
    kept = int(wanted.counts_E.sum())
    order = routing.order_R.div(2, rounding_mode="floor"), routing.order_R % 2
    assert torch.equal(order[0][:kept], numbers[wanted.order_R[:kept].div(2, rounding_mode="floor")])
    assert torch.equal(order[1][:kept], wanted.order_R[:kept] % 2)
    assert torch.equal(order[0][2 * len(numbers) :: 2], (~keep).nonzero().squeeze(1))  # the last, in their order
    torch.testing.assert_close(y[keep], wanted_y)
    assert not y[~keep].any()
    torch.testing.assert_close(masked, alone)
    assert not masked[~keep].any()


@pytest.mark.parametrize(
    ("keep", "said"),
    [([True], "keep must be a torch.Tensor"), (torch.ones(3).bool(), r"bool \[10\]"), (torch.ones(10), r"bool \[10\]")],
)
def test_a_mask_of_another_form_is_refused(keep: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ops.route_topk(torch.zeros(10, 4), 2, keep=keep)  # type: ignore[arg-type]
