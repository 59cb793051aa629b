"""What an engine attaches to weights: copies that follow them when told, sums of gradients where they are used."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from cdrmix.ops.weights import attach, compute_weight, gradient_sum, is_attached, refresh

BF16 = torch.bfloat16


def make_weight() -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(5, 3))


def test_without_anything_attached_a_weight_is_cast_and_has_no_sum() -> None:
    weight = make_weight()
    assert not is_attached(weight, BF16)
    found = compute_weight(weight, BF16)
    assert torch.equal(found, weight.detach().to(BF16))
    assert not found.requires_grad
    assert compute_weight(weight, torch.float32).data_ptr() == weight.data_ptr()
    with torch.no_grad():
        assert gradient_sum(weight) is None
    refresh([weight])


def test_a_copy_is_made_once_and_follows_its_weight_when_told() -> None:
    weight, untouched = make_weight(), make_weight()
    attach([weight, untouched], BF16, add_gradients=False)
    found = compute_weight(weight, BF16)
    assert compute_weight(weight, BF16) is found
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(AssertionError, match="not refreshed"):
        compute_weight(weight, BF16)
    refresh([weight, untouched])
    assert compute_weight(weight, BF16) is found
    assert torch.equal(found, weight.detach().to(BF16))
    # Products in another dtype get a cast of their own.
    assert torch.equal(compute_weight(weight, torch.float64), weight.detach().double())
    with torch.no_grad():
        assert gradient_sum(weight) is None


def test_the_sum_is_the_gradient_and_begins_with_the_first_product() -> None:
    weight, frozen = make_weight(), make_weight().requires_grad_(False)
    attach([weight, frozen], BF16, add_gradients=True)
    assert weight.grad is None
    assert gradient_sum(weight) is None, "with gradients enabled a second derivative is wanted"
    with torch.no_grad():
        assert gradient_sum(frozen) is None
        found = gradient_sum(weight)
        assert found is weight.grad
        assert torch.equal(found, torch.zeros(5, 3))
        found += 1
        assert gradient_sum(weight) is found
    weight.grad = None
    with torch.no_grad():
        assert torch.equal(gradient_sum(weight), torch.zeros(5, 3))


def test_nothing_of_it_is_saved_or_copied() -> None:
    layer = nn.Linear(3, 5, bias=False)
    attach(layer.parameters(), BF16, add_gradients=True)
    compute_weight(layer.weight, BF16)
    assert list(layer.state_dict()) == ["weight"]
    assert not is_attached(copy.deepcopy(layer).weight, BF16)
    assert is_attached(layer.weight, BF16)
    assert not is_attached(layer.weight, torch.float32)
