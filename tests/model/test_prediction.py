"""Multi-token prediction: losses and gradients of every kind against the plain formula, documents, curriculum."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from cdrmix.config.schema_prediction import Prediction
from cdrmix.model.fast_weights import FastWeightSpan
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.loss import LossModel
from cdrmix.model.prediction import Depths, depth_weights

KINDS = ("shared", "maps", "heads", "chain", "sequential")
MakeModel = Callable[..., LanguageModel]


def batch_of(lengths: list[list[int]], seed: int, vocabulary: int = 23) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, targets, weights [B, T] and cu_seqlens of rows of documents with these lengths."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(lengths), sum(lengths[0])
    ids, targets = (torch.randint(vocabulary, shape, generator=generator) for _ in range(2))
    bounds = [0]
    for length in (length for row in lengths for length in row):
        bounds.append(bounds[-1] + length)
    weights = torch.rand(shape, generator=generator, dtype=torch.float64)
    flat_ids, flat_targets = ids.view(-1), targets.view(-1)
    for start, end in itertools.pairwise(bounds):  # a target is the next token; the last one ends the text
        flat_targets[start : end - 1] = flat_ids[start + 1 : end]
    return ids, targets, torch.where(weights < 0.2, 0.0, weights), torch.tensor(bounds, dtype=torch.int32)


def plain_loss(model: LanguageModel, batch: tuple[Tensor, ...], depths: Depths) -> Tensor:
    """The weighted sum of all depths' cross-entropies: document by document, token by token."""
    ids, targets, weights, bounds = batch[0].view(-1), batch[1].view(-1), batch[2].view(-1), batch[3].tolist()
    assert model.prediction is not None
    section, terms = model.prediction.section, []
    for start, end in itertools.pairwise(bounds):
        text = ids[start:end]
        hidden = model(text.unsqueeze(0)).hidden_BTD[0]
        terms.append((weights[start:end] * cross_entropies(hidden @ model.head_weight.mT, targets[start:end])).sum())
        state = hidden.detach() if section.detach else hidden
        for shift in range(1, section.tokens):
            state, logits = depth_of(model, shift, state, text, section)
            for place in range(end - start - shift):
                if (start + place - depths.first) % section.every == 0 and start + place >= depths.first:
                    at = start + place + shift
                    nats = cross_entropies(logits[place : place + 1], targets[at : at + 1])[0]
                    terms.append(depths.weights[shift - 1] * section.every * weights[at] * nats)
    return torch.stack(terms).sum()


def cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits, targets, reduction="none")


def normed(norm: Any, x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def depth_of(
    model: LanguageModel, shift: int, state: Tensor, text: Tensor, section: Prediction
) -> tuple[Tensor, Tensor]:
    """The state of depth shift + 1 and its logits for one document, by the formulas of the docstrings."""
    assert model.prediction is not None
    head = model.head_weight.detach() if section.detach else model.head_weight
    if section.kind == "shared":
        return state, state @ head.mT
    depth: Any = model.prediction.depths[shift - 1]
    if section.kind == "heads":
        return state, state @ depth.head.weight.mT
    if section.kind == "maps":
        return state, normed(depth.norm, state + functional.silu(state @ depth.down.weight.mT)) @ head.mT
    token = torch.zeros_like(state)
    table = model.embedding.weight.detach() if section.detach else model.embedding.weight
    token[: len(text) - shift] = table[text[shift:]]
    both = torch.cat([normed(depth.state_norm, state), normed(depth.token_norm, token)], -1)
    if section.kind == "chain":
        change = functional.silu(both @ depth.up.weight.mT) @ depth.down.weight.mT
        # A later depth reads the state of this one before its norm, so of the sum.
        state = state + change
        return state, normed(depth.norm, state) @ head.mT
    joined = (both @ depth.joined.weight.mT).unsqueeze(0)
    context = model.prediction.context(text.unsqueeze(0), None, joined, 0, keep_cache=False)
    made = depth.block(joined, None, context, FastWeightSpan(), None)
    state = (made.x + made.y)[0]
    return state, normed(depth.norm, state) @ head.mT


def gradients(model: LanguageModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("kind", "mixer"), [*((kind, "attention") for kind in KINDS), ("sequential", "rwkv7"), ("sequential", "mamba2")]
)
@settings(max_examples=examples(2), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_values_and_gradients_equal_the_plain_formula(
    make_model: MakeModel, kind: str, mixer: str, data: st.DataObject
) -> None:
    tokens = data.draw(st.integers(2, 4))
    section = Prediction(
        tokens=tokens,
        kind=kind,  # type: ignore[arg-type]
        weights=[1.0, *data.draw(st.lists(st.sampled_from([0.0, 0.3, 1.5]), min_size=tokens - 1, max_size=tokens - 1))],
        every=data.draw(st.integers(1, 5)),
        detach=kind != "shared" and data.draw(st.booleans()),
        mixer=mixer,  # type: ignore[arg-type]
    )
    pieces = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    rows = [pieces, *([pieces[::-1]] * data.draw(st.integers(0, 1)))]
    model = make_model(
        prediction=section,
        tie_embeddings=data.draw(st.booleans()),
        activation_checkpointing=data.draw(st.booleans()),
        layers=2,
    )
    batch = batch_of(rows, data.draw(st.integers(0, 9)))
    depths = Depths.of(section, data.draw(st.integers(0, 5)), 6)
    losses = LossModel(model)(*batch, 7.0, 1.0, depths)
    router = LossModel(model)(*batch, 7.0, 1.0)
    plain = plain_loss(model, batch, depths)
    # float64: sums of some 60 terms of size 10; the routers' losses are those of the next-token loss.
    text = losses.total - (router.total - router.next_token_sum / 7.0)
    torch.testing.assert_close(text * 7.0, plain, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(losses.next_token_sum, router.next_token_sum, rtol=1e-12, atol=0)
    found, expected = gradients(model, text * 7.0), gradients(model, plain)
    if not any(section.depth_weights):  # of depths without a weight the gradients are zeros, and not absent
        assert set(expected) <= set(found)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected.get(name, torch.zeros_like(gradient)), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("curriculum", ["none", "forward"])
def test_without_weights_it_is_the_plain_loss_to_the_bit(make_model: MakeModel, kind: str, curriculum: str) -> None:
    weights = [1.0, 0.0, 0.0, 0.0] if curriculum == "none" else None  # forward: the first part has depth 1 alone
    section = Prediction(tokens=4, kind=kind, weights=weights, curriculum=curriculum)  # type: ignore[arg-type]
    model, alone = make_model(prediction=section).float(), make_model().float()
    alone.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("prediction.")})
    batch = tuple(x.float() if x.is_floating_point() else x for x in batch_of([[5, 9, 2], [16]], 1))
    losses = LossModel(model)(*batch, 19.0, 1.0, Depths.of(section, 3, 100))
    plain = LossModel(alone)(*batch, 19.0, 1.0)
    assert torch.equal(losses.total, plain.total)
    assert torch.equal(losses.next_token_sum, plain.next_token_sum)
    found, expected = gradients(model, losses.total), gradients(alone, plain.total)
    assert all(torch.equal(gradient, found[name]) for name, gradient in expected.items())
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert not any(found[name].any() for name in found.keys() - expected.keys())


@pytest.mark.parametrize("kind", KINDS)
def test_no_target_and_no_token_crosses_a_document(make_model: MakeModel, kind: str) -> None:
    # Document 1 of the row is changed altogether: no loss of documents 0 and 2, and no gradient of theirs, changes.
    section = Prediction(tokens=4, kind=kind, every=1)  # type: ignore[arg-type]
    model = make_model(prediction=section)
    ids, targets, weights, bounds = batch_of([[6, 5, 7]], 3)
    weights = torch.ones_like(weights)
    weights[:, 6:11] = 0.0
    planted_ids, planted_targets = ids.clone(), targets.clone()
    planted_ids[:, 6:11], planted_targets[:, 6:11] = 22, 21
    depths = Depths.of(section, 0, 1)
    texts = (ids, targets), (planted_ids, planted_targets)
    one, other = (LossModel(model)(*text, weights, bounds, 1.0, 0.0, depths) for text in texts)
    assert one.prediction_2K is not None
    assert other.prediction_2K is not None
    # In float64 other tokens of document 1 change the order of the sums of experts, and nothing else.
    torch.testing.assert_close(one.prediction_2K, other.prediction_2K, rtol=1e-12, atol=0)
    # The last i tokens of a document have no target at depth i + 1.
    assert one.prediction_2K[1].tolist() == [6 + 7 - 2 * shift for shift in (1, 2, 3)]
    # With these weights at the planted tokens they would count: 3 documents have 3 last tokens.
    every = LossModel(model)(ids, targets, torch.ones_like(weights), bounds, 1.0, 0.0, depths).prediction_2K
    assert every is not None
    assert every[1].tolist() == [18 - 3 * shift for shift in (1, 2, 3)]
    packed = LossModel(model)(ids, targets, torch.ones_like(weights), bounds, 1.0, 0.0, depths).total
    parts = [
        LossModel(model)(ids[:, a:b], targets[:, a:b], torch.ones(1, b - a).double(), None, 1.0, 0.0, depths).total
        for a, b in ((0, 6), (6, 11), (11, 18))
    ]
    torch.testing.assert_close(packed, torch.stack(parts).sum(), rtol=1e-12, atol=0)  # sums of 60 float64 terms


@pytest.mark.parametrize("kind", ["maps", "heads", "chain", "sequential"])
def test_detached_depths_change_only_their_own_parameters(make_model: MakeModel, kind: str) -> None:
    section = Prediction(tokens=3, kind=kind, detach=True)  # type: ignore[arg-type]
    model = make_model(prediction=section)
    batch = batch_of([[5, 9, 2], [16]], 1)
    with_depths = gradients(model, LossModel(model)(*batch, 1.0, 1.0, Depths.of(section, 0, 1)).total)
    plain = gradients(model, LossModel(model)(*batch, 1.0, 1.0).total)
    assert all(torch.equal(with_depths[name], gradient) for name, gradient in plain.items())
    assert all(with_depths[name].any() for name in with_depths if name.startswith("prediction."))


def test_sets_of_weights_share_the_further_depths(make_model: MakeModel) -> None:
    section = Prediction(tokens=3, kind="chain", every=2)
    model = LossModel(make_model(prediction=section))
    ids, targets, weights, bounds = batch_of([[5, 9, 2], [16]], 1)
    first = torch.zeros_like(weights)
    first[:, ::3] = weights[:, ::3]
    depths = Depths.of(section, 1, 2)
    whole = model(ids, targets, weights, bounds, 1.0, 0.0, depths)
    parts = model(ids, targets, torch.stack([first, weights - first]), bounds, 1.0, 0.0, depths)
    torch.testing.assert_close(parts.next_token_sum.sum(), whole.next_token_sum, rtol=1e-12, atol=0)
    torch.testing.assert_close(parts.prediction_2K, whole.prediction_2K, rtol=1e-12, atol=0)


def test_the_other_parameters_are_those_without_the_section(make_model: MakeModel) -> None:
    alone = make_model().config
    for kind in KINDS:
        torch.manual_seed(5)
        plain = LanguageModel(alone).state_dict()
        torch.manual_seed(5)
        section = Prediction(kind=kind)  # type: ignore[arg-type]
        model = LanguageModel(alone.model_copy(update={"prediction": section})).state_dict()
        assert all(torch.equal(model[name], tensor) for name, tensor in plain.items())


def test_the_curriculum_is_a_function_of_the_step() -> None:
    weights = [1.0, 0.5, 0.25]

    def at(curriculum: str) -> list[tuple[float, ...]]:
        section = Prediction(tokens=3, weights=weights, curriculum=curriculum)  # type: ignore[arg-type]
        return [depth_weights(section, step, 7) for step in range(7)]

    assert at("none") == [(0.5, 0.25)] * 7
    assert at("forward") == [(0, 0)] * 3 + [(0.5, 0)] * 2 + [(0.5, 0.25)] * 2
    assert at("reverse") == [(0.5, 0.25)] * 3 + [(0.5, 0)] * 2 + [(0, 0)] * 2
    assert Prediction(tokens=4).depth_weights == pytest.approx((0.1, 0.1, 0.1))


def test_every_token_is_trained_once_in_as_many_steps() -> None:
    section = Prediction(every=4)
    assert sorted(Depths.of(section, step, 9).first for step in range(3, 7)) == [0, 1, 2, 3]


def test_depths_of_a_model_without_them_are_refused(make_model: MakeModel) -> None:
    with pytest.raises(ValueError, match=r"model\.prediction"):
        LossModel(make_model())(*batch_of([[4]], 0), 1.0, 1.0, Depths((0.3,), 0))
