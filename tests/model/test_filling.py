"""Filling is no token: rows with filling have the loss, gradients, counts and reports of their documents alone."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cdrmix.config.schema_layers import Depth, FeedForward
from cdrmix.config.schema_model import Attention, Mamba, Model, Rwkv
from cdrmix.config.schema_prediction import Prediction
from cdrmix.model.context import Context, Tokens
from cdrmix.model.depth import DepthRouter
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.loss import Losses, LossModel
from cdrmix.model.prediction import Depths

BOUND = 1e-10  # two float64 evaluations of one function in different orders
TOP_K = 2
# Blocks of mamba2, attention, routing_mamba, attention, rwkv7; two of the mixers need a row in which documents start.
HYBRID = {"layers": 5, "mixer_layers": {"mamba2": [0], "routing_mamba": [2]}}
MODELS: dict[str, dict[str, Any]] = {
    "every mixer": HYBRID,
    "dropping": {"drop": True, "capacity_factor": 1.0, **HYBRID},
    "shared": {"shared_hidden": 4, "activation": "swiglu", "bias_update_rate": 0.1},
    "skipping experts": {"part": "feed_forward", "drop": True, "capacity_factor": 1.0},
    "skipping dense": {"part": "feed_forward", "kind": "dense"},
    "skipping both": {"part": "both", **HYBRID},
    "predicting": {"prediction": Prediction(tokens=3, kind="sequential", mixer="rwkv7", every=1)},
}


def model_of(
    *,
    part: str | None = None,
    layers: int = 2,
    mixer_layers: dict[str, list[int]] | None = None,
    prediction: Prediction | None = None,
    **feed_forward: Any,
) -> LossModel:
    """A float64 model with no weight at zero. A branch that skips keeps about half of the tokens."""
    config = Model(
        vocab_size=23,
        d_model=16,
        layers=layers,
        attention=Attention(heads=2, kv_heads=1),
        rwkv=Rwkv(head_size=16, decay_rank=3, iclr_rank=3, value_rank=2, gate_rank=4),
        mamba=Mamba(d_state=12, head_dim=8, groups=2),
        mixer_layers=mixer_layers or {},
        feed_forward=FeedForward(
            **{
                "hidden": 8,
                "experts": 4,
                "top_k": TOP_K,
                "load_balance_weight": 1.0,
                "z_loss_weight": 1.0,
                **feed_forward,
            }
        ),
        depth=None if part is None else Depth(part=part),  # type: ignore[arg-type]
        prediction=prediction,
    )
    torch.manual_seed(1)
    model = LanguageModel(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        for module in model.modules():
            if isinstance(module, DepthRouter):
                module.bias.zero_()
    return LossModel(model)


class Packed(NamedTuple):
    """Documents in rows: the first arguments of a loss model."""

    ids_BT: Tensor
    targets_BT: Tensor
    weights_BT: Tensor
    documents: tuple[Tensor, Tensor | None]


def packed(documents: list[Tensor], rows: list[list[int]], width: int) -> Packed:
    """The documents [2 + 1, L] (ids, targets, weights) with these numbers in each row, then filling."""
    values, bounds, tokens = torch.zeros(3, len(rows), width, dtype=torch.float64), {0}, []
    values[:2] = 7
    for row, numbers in enumerate(rows):
        place = 0
        for number in numbers:
            length = documents[number].shape[1]
            values[:, row, place : place + length] = documents[number]
            tokens += range(row * width + place, row * width + place + length)
            place += length
            bounds.add(row * width + place)
        bounds.add((row + 1) * width)
    ids, targets, weights = values
    starts = torch.tensor(sorted(bounds), dtype=torch.int32)
    whole = len(tokens) == len(rows) * width
    return Packed(
        ids.long(), targets.long(), weights, (starts, None if whole else torch.tensor(tokens, dtype=torch.int64))
    )


def trained(model: LossModel, batch: Packed, depths: Depths | None) -> tuple[Losses, dict[str, Tensor]]:
    model.zero_grad()
    losses = model(*batch, 10.0, 1.0, depths)
    losses.total.backward()
    return losses, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def tensors(value: object) -> list[Tensor]:
    if isinstance(value, tuple):
        return [tensor for each in value for tensor in tensors(each)]
    return [value] if isinstance(value, Tensor) else []


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=examples(3))
@given(st.lists(st.integers(1, 7), min_size=2, max_size=6), st.integers(1, 5), st.integers(0, 99), st.data())
def test_rows_with_filling_train_as_their_documents_alone(
    name: str, lengths: list[int], spare: int, seed: int, data: st.DataObject
) -> None:
    model = model_of(**MODELS[name])
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(0, 23, (3, length), generator=generator).double() for length in lengths]
    for document in documents:
        document[2] = (document[2] > 8).double()  # some tokens have no weight: they are tokens
    rows = [list(range(len(lengths)))]
    for _ in range(data.draw(st.integers(0, 2))):  # documents keep their order, in more rows
        at = data.draw(st.integers(0, len(rows[-1])))
        rows[-1:] = [rows[-1][:at], rows[-1][at:]]
    width = max(sum(lengths[number] for number in row) for row in rows) + spare
    depths = None if MODELS[name].get("prediction") is None else Depths((0.5, 0.25), 0)
    alone, expected = trained(model, packed(documents, [list(range(len(lengths)))], sum(lengths)), depths)
    filled, found = trained(model, packed(documents, rows, width), depths)
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        assert (found[parameter] - gradient).abs().max() < BOUND, parameter
    for left, right in zip(tensors(filled), tensors(alone), strict=True):
        assert (left.double() - right.double()).abs().max() < BOUND
    router, config = filled.router, model.language_model.config
    if router is not None and config.depth is None:
        assert (router.tokens_per_expert_LE.sum(1) == sum(lengths) * TOP_K).all()
        assert config.feed_forward.drop or torch.equal(router.counts_LE, router.tokens_per_expert_LE)


def test_rows_without_a_token_are_in_no_report() -> None:
    """As a process has in an evaluation that has no row left for it."""
    for options in (MODELS["every mixer"], MODELS["skipping both"]):
        batch = packed([torch.zeros(3, 1)], [[]], 6)
        losses, gradients = trained(model_of(**options), batch, None)
        assert losses.total == 0
        assert not any(gradient.any() for gradient in gradients.values())
        assert losses.router is not None
        assert not losses.router.tokens_per_expert_LE.any()
        assert losses.depth is None or not (losses.depth.kept_G.any() or losses.depth.tokens_G.any())


def test_a_row_whose_positions_are_all_tokens_has_the_same_bits() -> None:
    """A mask that hides nothing is only another way to say so."""
    model = model_of(**MODELS["dropping"])
    ids = torch.randint(0, 23, (2, 9), generator=torch.Generator().manual_seed(3))
    starts, weights = torch.tensor([0, 4, 9, 18], dtype=torch.int32), torch.ones(2, 9, dtype=torch.float64)
    results = [trained(model, Packed(ids, ids, weights, (starts, tokens)), None) for tokens in (None, torch.arange(18))]
    for left, right in zip(tensors(results[0][0]), tensors(results[1][0]), strict=True):
        assert torch.equal(left, right)
    assert all(torch.equal(results[0][1][name], gradient) for name, gradient in results[1][1].items())


class NoReads(TorchDispatchMode):
    """Refuses to hand a value to the host outside of an operator of ours, which sees counts of a CPU for nothing."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.name() not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::item"), function.name()
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["skipping experts", "skipping dense"])
def test_the_host_reads_nothing_of_the_filling(name: str) -> None:
    """On a GPU it would wait. The stack is without mixers that read on a CPU what they do not read on a GPU."""
    block: Any = model_of(**MODELS[name]).language_model.blocks[0]
    x, places = torch.randn(2, 6, 16, dtype=torch.float64), torch.tensor([0, 1, 2, 6, 7])
    with NoReads():
        context = Context(tokens=Tokens.of(places, 12))
        gate = block.depth_routers["feed_forward"].gate(x.flatten(0, 1), context)
        fed = block.feed_forward(x, context, None, gate)
    assert not fed.y[0, 3:].any()
    assert not fed.y[1, 2:].any()
    assert gate.gated.tokens == 5


def test_pairs_that_follow_each_other_have_their_places() -> None:
    batch = packed([torch.ones(3, 2), torch.ones(3, 3)], [[0], [1]], 4)
    starts, tokens = batch.documents
    assert tokens is not None
    assert (starts.tolist(), tokens.tolist()) == ([0, 2, 4, 7, 8], [0, 1, 4, 5, 6])
    assert [b - a for a, b in itertools.pairwise(starts.tolist())] == [2, 2, 3, 1]
