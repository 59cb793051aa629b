"""Attention's keys and values from token to token: buffers that grow by doubling, states that stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cdrmix.model.cache import concatenated, filled, flattened, select, unread
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.mixers.attention import AttentionCache, extended

MakeModel = Callable[..., LanguageModel]
BOUND = 1e-10  # two float64 evaluations of one function in different orders


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 23, (2, count), generator=torch.Generator().manual_seed(seed))


def keys_values(length: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, length, 3, 4, generator=generator) for _ in range(2))  # type: ignore[return-value]


@torch.no_grad()
def test_a_cache_is_copied_as_often_as_its_length_doubles() -> None:
    state, parts, buffers = extended(None, *keys_values(3, 0), keep=True), [keys_values(3, 0)], []
    for number in range(1, 200):
        parts.append(keys_values(1, number))
        state = extended(state, *parts[-1], keep=True)
        if state.buffer not in buffers:
            buffers.append(state.buffer)
    assert len(buffers) == 6  # 8, 18, 38, 78, 158, 318 tokens
    for found, wanted in zip(state[:2], zip(*parts, strict=True), strict=True):
        assert torch.equal(found, torch.cat(wanted, 1).transpose(1, 2))


@torch.no_grad()
def test_a_state_stays_as_it_is_whatever_is_read_behind_it() -> None:
    """Two continuations of one state, and one of an older state: each sees its own tokens alone."""
    root = extended(extended(None, *keys_values(2, 0), keep=True), *keys_values(1, 1), keep=True)
    left = extended(root, *keys_values(2, 2), keep=True)
    right = extended(root, *keys_values(1, 3), keep=True)
    again = extended(left, *keys_values(1, 4), keep=True)
    assert left.buffer is root.buffer is again.buffer
    assert right.buffer is not root.buffer
    made = {number: keys_values(length, number) for number, length in enumerate([2, 1, 2, 1, 1])}
    for state, numbers in ((root, (0, 1)), (left, (0, 1, 2)), (right, (0, 1, 3)), (again, (0, 1, 2, 4))):
        assert torch.equal(state.keys, torch.cat([made[number][0] for number in numbers], 1).transpose(1, 2))
        assert torch.equal(state.values, torch.cat([made[number][1] for number in numbers], 1).transpose(1, 2))


@torch.no_grad()
def test_what_is_only_asked_gives_its_place_back() -> None:
    root = extended(extended(None, *keys_values(4, 0), keep=True), *keys_values(1, 1), keep=True)
    for seed in (2, 3):
        asked = extended(root, *keys_values(2, seed), keep=False)
        assert asked.buffer is root.buffer
        assert torch.equal(asked.keys[:, :, 5:], keys_values(2, seed)[0].transpose(1, 2))
    assert root.buffer is not None
    assert root.buffer.used == 5


def test_the_model_branches_and_rolls_back_like_one_pass(make_model: MakeModel) -> None:
    """Proposals that are dropped, kept ones, single tokens and chunks, in eval mode without gradients."""
    model, ids = make_model(attention_fraction=1.0, layers=2, kv_heads=1).eval(), tokens(12)
    with torch.no_grad():
        whole = model(ids).hidden_BTD
        state, pieces = model(ids[:, :4], return_cache=True).cache, []
        for start, end in ((4, 5), (5, 6), (6, 9), (9, 12)):
            model(tokens(3, seed=end), cache=state, return_cache=True)  # a proposal that is not taken
            output = model(ids[:, start:end], cache=state, return_cache=True)
            model(tokens(2, seed=end), cache=state)  # a question
            state = output.cache
            pieces.append(output.hidden_BTD)
    assert (torch.cat(pieces, 1) - whole[:, 4:]).abs().max() < BOUND


def test_gradients_go_through_a_state_that_is_continued(make_model: MakeModel) -> None:
    model, ids = make_model(attention_fraction=1.0, layers=2), tokens(8)
    parameters = list(model.parameters())
    whole = torch.autograd.grad(model(ids).hidden_BTD[:, 5:].square().sum(), parameters, allow_unused=True)
    begun = model(ids[:, :5], return_cache=True)
    then = model(ids[:, 5:], cache=begun.cache, return_cache=True)
    with torch.no_grad():  # which writes behind neither of what the backward pass needs
        for state in (begun.cache, then.cache):
            model(tokens(1), cache=model(tokens(1), cache=state, return_cache=True).cache)
    parts = torch.autograd.grad(then.hidden_BTD.square().sum(), parameters, allow_unused=True)
    for left, right in zip(whole, parts, strict=True):
        assert (left is None) == (right is None)
        assert left is None or (left - right).abs().max() < BOUND * max(1, left.abs().max())


@torch.no_grad()
def test_states_are_saved_and_joined_without_their_buffers(make_model: MakeModel) -> None:
    model = make_model(attention_fraction=1.0, layers=2, kv_heads=1).eval()
    state = model(tokens(5), return_cache=True).cache
    state = model(tokens(1), cache=state, return_cache=True).cache
    saved = flattened(state)
    assert {name for name in saved if "mixer" in name} == {
        f"{block}.mixer.{part}" for block in (0, 1) for part in ("keys", "values")
    }
    assert saved["0.mixer.keys"].shape == (2, 1, 6, model.config.d_model // model.config.attention.heads)
    again = filled(state, saved)
    assert isinstance(again[0].mixer, AttentionCache)
    joined = concatenated(select(state, torch.tensor([1])), select(again, torch.tensor([0])))
    expected = model(tokens(2), cache=state).hidden_BTD
    assert (model(tokens(2), cache=again).hidden_BTD - expected).abs().max() < BOUND
    assert (model(tokens(2)[[1, 0]], cache=joined).hidden_BTD[[1, 0]] - expected).abs().max() < BOUND
    assert unread(state, 3)[0].mixer.keys.shape[:3] == (3, 1, 0)
