"""The router: selection bias, jitter, capacity, and what a bad input is told."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cdrmix.config.schema_layers import FeedForward
from cdrmix.model.feed_forward.router import Router, balance_routers
from cdrmix.model.language_model import LanguageModel


def router(**options: object) -> Router:
    torch.manual_seed(0)
    return Router(6, FeedForward.model_validate({"hidden": 8, "experts": 4, "top_k": 2, **options}))


def test_the_bias_moves_by_the_rate_against_the_load_and_stays_centred() -> None:
    gate = router(bias_update_rate=0.5)
    gate.balance(torch.tensor([9.0, 3.0, 2.0, 2.0]), 0.5)
    # Signs of mean - load: -1, 1, 1, 1; their mean, 0.5, is taken off.
    assert gate.bias is not None
    assert gate.bias.tolist() == [-0.75, 0.25, 0.25, 0.25]
    gate.balance(torch.tensor([4.0, 4.0, 4.0, 4.0]), 0.5)
    assert gate.bias.tolist() == [-0.75, 0.25, 0.25, 0.25]


def test_the_bias_evens_a_skewed_load_and_leaves_the_weights_to_the_logits() -> None:
    gate, x = router(bias_update_rate=0.05), torch.randn(400, 6) + 1
    with torch.no_grad():
        gate.weight.mul_(10)
    before = gate.route(x).tokens_per_expert_E.max() / 200
    for _ in range(200):
        gate.balance(gate.route(x).tokens_per_expert_E, 0.05)
    routing = gate.route(x)
    assert before > 1.3
    assert routing.tokens_per_expert_E.max() / 200 < 1.1
    torch.testing.assert_close(routing.weights_TK, gate(x).gather(1, routing.experts_TK).softmax(-1))


def test_every_routed_layer_is_balanced_by_its_own_load() -> None:
    layers = torch.nn.ModuleList([router(bias_update_rate=1.0), torch.nn.Linear(2, 2), router(bias_update_rate=1.0)])
    balance_routers(layers, torch.tensor([[8, 0, 4, 4], [4, 4, 0, 8]]), 1.0)
    assert layers[0].bias.tolist() == [-1.0, 1.0, 0.0, 0.0]
    assert layers[2].bias.tolist() == [0.0, 0.0, 1.0, -1.0]


def test_without_a_rate_there_is_no_bias_and_a_checkpoint_holds_none() -> None:
    assert router().bias is None
    assert list(router().state_dict()) == ["weight"]
    assert list(router(bias_update_rate=0.1).state_dict()) == ["weight", "bias"]


def test_jitter_is_for_training_and_comes_from_the_seed() -> None:
    gate, x = router(router_jitter=0.1), torch.randn(50, 6)
    plain = x @ gate.weight.mT

    def logits() -> Tensor:
        torch.manual_seed(7)
        return gate(x)

    assert torch.equal(logits(), logits())
    assert not torch.equal(logits(), plain)
    assert ((logits() - plain).abs() <= 0.1 * (x.abs() @ gate.weight.abs().mT) + 1e-6).all()
    assert torch.equal(gate.eval()(x), plain)


def test_dropping_bounds_the_rows_of_an_expert_in_training_alone() -> None:
    gate, x = router(drop=True, capacity_factor=1.0), torch.randn(30, 6) + 3
    routing = gate.route(x)
    assert gate.capacity(30) == 15  # ceil(1.0 * 2 * 30 / 4)
    assert routing.counts_E.max() == 15
    assert routing.tokens_per_expert_E.max() > 15
    assert torch.equal(gate.eval().route(x).counts_E, routing.tokens_per_expert_E)
    assert router().capacity(30) is None


def test_nan_names_the_layer(make_model) -> None:  # type: ignore[no-untyped-def]
    model: LanguageModel = make_model()
    with torch.no_grad():
        model.blocks[2].feed_forward.router.weight[0, 0] = torch.nan  # type: ignore[union-attr, index]
    with pytest.raises(ValueError, match=r"logits of blocks\.2\.feed_forward\.router hold NaN"):
        model(torch.zeros(1, 5, dtype=torch.int64))


def test_an_empty_batch_is_refused(make_model) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="give at least one token"):
        make_model()(torch.zeros(2, 0, dtype=torch.int64))


def test_activation_checkpointing_counts_once(make_model) -> None:  # type: ignore[no-untyped-def]
    ids = torch.arange(12).view(2, 6)
    counts = []
    for checkpointing in (False, True):
        output = make_model(activation_checkpointing=checkpointing)(ids)
        output.hidden_BTD.sum().backward()
        counts.append(output.router.tokens_per_expert_LE)
    assert torch.equal(*counts)
    assert counts[0].sum() == 4 * 12 * 2
