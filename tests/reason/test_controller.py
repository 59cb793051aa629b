"""The controller: exact rollback, rows with different decisions, branches, streams, causality, the index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cdrmix.config.schema_layers import FeedForward
from cdrmix.config.schema_model import Attention, Mamba, Model, Rwkv
from cdrmix.config.schema_reasoning import Controller as ControllerSection
from cdrmix.config.schema_reasoning import Memory, PlasticLora, Reasoning, Rl
from cdrmix.model.cache import fast_weights, tensors
from cdrmix.model.fast_weights import FastWeightOptions
from cdrmix.model.language_model import LanguageModel
from cdrmix.reason.controller.controller import (
    Controller,
    EpisodeState,
    action_of,
    always,
    by_head,
    by_value,
    decision_of,
    never,
    sampled,
)
from cdrmix.reason.heads import ControllerHeads
from cdrmix.reason.memory.episodic_index import EpisodicIndex, Staged

CHUNK, WIDTH, VOCABULARY = 4, 16, 23
# Two float64 evaluations of one function in different orders, through 3 blocks of order 1.
BOUND = 1e-10
MIXERS: list[dict[str, Any]] = [
    {"attention_fraction": 0.0},
    {"attention_fraction": 0.34},  # the last of three layers
    {"attention_fraction": 0.0, "mixer_layers": {"mamba2": [1]}},
]


def make(
    *,
    carry: str = "all",
    branches: int = 1,
    attention_fraction: float = 0.0,
    mixer_layers: dict[str, list[int]] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Controller:
    """A controller of a model of width 16 whose parameters are all off their initial zeros."""
    config = Model(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        layers=3,
        attention_fraction=attention_fraction,
        attention=Attention(heads=2, kv_heads=1),
        mixer_layers=mixer_layers or {},
        rwkv=Rwkv(head_size=16, decay_rank=3, iclr_rank=3, value_rank=2, gate_rank=4),
        mamba=Mamba(d_state=8, head_dim=8),
        feed_forward=FeedForward(kind="channel_mix", hidden=8),
    )
    reasoning = Reasoning(
        chunk=CHUNK,
        carry=carry,  # type: ignore[arg-type]
        plastic_lora=PlasticLora(rank=3, key_width=5, alpha=1.0, decay=0.9),
        controller=ControllerSection(step_budget=8, max_branches=branches),
        memory=Memory(dim=4, top_k=2, max_tokens=100),
        rl=Rl(horizon=8, latency_weight=0.0, stability_weight=0.0),
    )
    torch.manual_seed(0)
    model = LanguageModel(config, reasoning=reasoning).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return Controller(model, reasoning)


def chunks(rows: int, count: int, seed: int = 1) -> Tensor:
    """Ids [B, N, C]."""
    return torch.randint(0, VOCABULARY, (rows, count, CHUNK), generator=torch.Generator().manual_seed(seed))


def same_bits(one: Any, other: Any) -> bool:
    ones, others = list(tensors(one)), list(tensors(other))
    return len(ones) == len(others) > 0 and all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


def committed(controller: Controller, ids_BNC: Tensor) -> EpisodeState:
    episode = controller.begin(len(ids_BNC))
    for ids_BC in ids_BNC.unbind(1):
        episode, _, _ = controller.step(episode, ids_BC, always)
    return episode


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.gate
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("carry", ["all", "fast"])
@pytest.mark.parametrize("mixers", MIXERS)
def test_a_rollback_leaves_no_bit_of_what_was_read(mixers: dict[str, Any], carry: str, dtype: torch.dtype) -> None:
    """After a rollback, state and next logits are those of an episode without the chunk; after a commit they differ."""
    controller, ids = make(carry=carry, dtype=dtype, **mixers), chunks(3, 4)
    before = committed(controller, ids[:, :2])
    kept = [leaf.clone() for leaf in tensors(before.groups)]
    after, _, _ = controller.step(before, ids[:, 2], never)
    assert all(torch.equal(one, other) for one, other in zip(kept, tensors(after.groups), strict=True))
    assert after.groups[0].cache is before.groups[0].cache, "a rollback copies nothing"
    direct, undone = (controller.model.logits(controller.ask(e, ids[:, 3])) for e in (before, after))
    assert torch.equal(direct, undone)
    other, _, _ = controller.step(before, ids[:, 2], always)
    assert (controller.model.logits(controller.ask(other, ids[:, 3])) - direct).abs().max() > 1e-6


@pytest.mark.parametrize("carry", ["all", "fast"])
@pytest.mark.parametrize("mixers", MIXERS)
def test_rows_decide_apart(mixers: dict[str, Any], carry: str) -> None:
    """Each of four rows has the state of an episode with only its committed chunks, independent of the other rows."""
    controller, ids = make(carry=carry, **mixers), chunks(4, 4)
    actions = torch.tensor([[0, 0, 0, 0], [1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 1, 1]])
    episode = controller.begin(4)
    for chunk, action in zip(ids.unbind(1), actions.unbind(1), strict=True):
        before = episode
        episode, _, _ = controller.step(episode, chunk, lambda _, action=action: decision_of(action))
        for rows, state in episode.groups:
            rolled = action[rows] == 0
            if carry == "fast" and state is not None and before.groups[0].cache is not None and rolled.any():
                for a, b in zip(tensors(state), tensors(before.groups[0].cache), strict=True):
                    assert torch.equal(a[rolled], b[rolled])
    assert torch.equal(torch.cat([rows for rows, _ in episode.groups]).sort().values, torch.arange(4))
    assert episode.commits_B.tolist() == actions.sum(1).tolist()
    if not mixers["attention_fraction"] or carry == "fast":
        assert len(episode.groups) == 1
    probe = chunks(4, 1, seed=7)[:, 0]
    together = controller.ask(episode, probe)
    for row in range(4):
        alone = committed(controller, ids[row : row + 1, actions[row] > 0])
        assert (controller.ask(alone, probe[row : row + 1])[0] - together[row]).abs().max() < BOUND


@pytest.mark.gate
def test_the_rows_of_an_unlike_decision_keep_their_bits() -> None:
    """A row that rolls back in a batch with rows that commit keeps the bits of its state and logits; and vice versa."""
    controller, ids = make(dtype=torch.float32), chunks(4, 3)
    before = committed(controller, ids[:, :1])
    proposal = controller.propose(before, ids[:, 1])
    mask = torch.tensor([True, False, False, True])
    after = controller.settle(before, proposal, decision_of(mask.long()))
    (group,) = after.groups
    old, new = before.groups[0].cache, proposal.after.groups[0].cache
    for leaf, left, right in zip(tensors(group.cache), tensors(old), tensors(new), strict=True):
        assert torch.equal(leaf[~mask], left[~mask])
        assert torch.equal(leaf[mask], right[mask])
    rolled_back = controller.settle(before, proposal, never(proposal.end_BD()))
    apart, all_back = (controller.ask(episode, ids[:, 2]) for episode in (after, rolled_back))
    assert torch.equal(apart[~mask], all_back[~mask])


@pytest.mark.parametrize("carry", ["all", "fast"])
def test_branches_equal_passes_apart(carry: str) -> None:
    """Four write strengths in one pass: each row's choice equals a pass at that strength; the outputs are equal."""
    many, one = make(branches=4, carry=carry), make(branches=1, carry=carry)
    ids = chunks(4, 3)
    start_many, start_one = committed(many, ids[:, :1]), committed(one, ids[:, :1])
    assert same_bits(start_many.groups, start_one.groups), "always commits what was trained: scale 1"
    proposal = many.propose(start_many, ids[:, 1])
    actions = torch.tensor([1, 2, 3, 4])
    episode = many.settle(start_many, proposal, decision_of(actions))
    state = episode.groups[0].cache
    assert state is not None
    for row, scale in enumerate(many.scales):
        apart = one.model(
            ids[:, 1],
            cache=start_one.groups[0].cache,
            return_cache=True,
            fast_weights=FastWeightOptions(scale_S=torch.tensor([scale])),
        )
        assert (apart.hidden_BTD - proposal.hidden_BCD).abs().max() < BOUND
        chosen = [
            each._replace(a=each.a[0], pending=each.pending[0]) for block in apart.cache for each in block.plastic
        ]
        found = [each for block in state for each in block.plastic or ()]
        for left, right in zip(chosen, found, strict=True):
            assert (left.a[row] - right.a[row]).abs().max() < BOUND
            assert (left.pending[row] - right.pending[row]).abs().max() < BOUND
    written = torch.stack([a[row] for a in fast_weights(state)[:1] for row in range(4)])
    assert (written[0] - written[1]).abs().max() > 1e-6
    rolled_back = many.settle(start_many, proposal, decision_of(torch.tensor([0, 0, 3, 0])))
    for leaf, old in zip(tensors(rolled_back.groups[0].cache), tensors(start_many.groups[0].cache), strict=True):
        assert torch.equal(leaf[[0, 1, 3]], old[[0, 1, 3]])


@pytest.mark.gate
@pytest.mark.parametrize("mixers", MIXERS)
def test_committing_everything_is_the_full_forward(mixers: dict[str, Any]) -> None:
    controller, ids = make(**mixers), chunks(2, 5)
    whole = controller.model(ids.flatten(1)).hidden_BTD
    episode, read = controller.begin(2), []
    for chunk in ids.unbind(1):
        episode, _, hidden = controller.step(episode, chunk, always)
        read.append(hidden)
    assert (torch.cat(read, 1) - whole).abs().max() < BOUND
    assert episode.steps == 5
    assert controller.steps_left(episode) == 8 - 5


def test_fast_weights_alone_are_carried_as_in_one_pass() -> None:
    """As in phase B1: mixers are reset at every chunk but not before the question, fast weights only at rows."""
    controller, ids = make(carry="fast", attention_fraction=0.34), chunks(2, 5)
    episode = controller.begin(2)
    for number, chunk in enumerate(ids.unbind(1)):
        starts = [20 * row + CHUNK * n for row in range(2) for n in range(number + 1)]
        bounds, rows = torch.tensor([*starts, 40], dtype=torch.int32), torch.arange(0, 41, 20, dtype=torch.int32)
        whole = controller.model(ids.flatten(1), cu_seqlens=bounds, fast_weights=FastWeightOptions(rows)).hidden_BTD
        asked = controller.ask(episode, ids[:, number:].flatten(1))
        assert (asked - whole[:, CHUNK * number :]).abs().max() < BOUND
        episode, _, hidden = controller.step(episode, chunk, always)
        assert (hidden - whole[:, CHUNK * number : CHUNK * (number + 1)]).abs().max() < BOUND
        state = episode.groups[0].cache
        assert state is not None
        assert all(block.mixer is None and block.feed_forward_BD is None for block in state)


@pytest.mark.gate
def test_a_later_chunk_changes_nothing_before_it() -> None:
    controller, ids = make(carry="fast"), chunks(3, 4)
    changed = ids.clone()
    changed[:, 2] = (changed[:, 2] + 1) % VOCABULARY
    heads = ControllerHeads(WIDTH, 1)
    with torch.no_grad():
        heads.accept.weight.normal_(generator=torch.Generator().manual_seed(3))
    found = []
    for tokens in (ids, changed):
        episode, hiddens = controller.begin(3), []
        for chunk in tokens.unbind(1):
            episode, decision, hidden = controller.step(episode, chunk, by_head(heads))
            hiddens.append((hidden, action_of(decision)))
        found.append(hiddens)
    for (hidden, action), (other, other_action) in zip(found[0][:2], found[1][:2], strict=True):
        assert torch.equal(hidden, other)
        assert torch.equal(action, other_action)
    episode, other_episode = committed(controller, ids[:, :3]), committed(controller, changed[:, :3])
    reached = controller.ask(episode, ids[:, 3]) - controller.ask(other_episode, ids[:, 3])
    assert reached.abs().max() > 1e-6, "what was written in between is read"


@pytest.mark.gate
def test_only_commits_reach_the_index(tmp_path: Path) -> None:
    """Of three rows' transactions two are committed: the log grows by these; a rollback changes no byte of it."""
    controller, ids = make(), chunks(3, 2)
    index = EpisodicIndex(tmp_path, 4, 100)

    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(tmp_path.iterdir()) if path.is_file()}

    def staged(row: int) -> Staged:
        one = Staged()
        one.add(np.eye(4, dtype=np.float32)[row], np.array([row], np.uint32))
        return one

    first = contents()
    episode = controller.begin(3)
    proposal = controller.propose(episode, ids[:, 0])
    proposal = proposal._replace(after=proposal.after._replace(transactions=tuple(staged(row) for row in range(3))))
    back = controller.settle(episode, proposal, never(proposal.end_BD()), index)
    assert contents() == first
    assert len(index) == 0
    assert back.transactions is None
    controller.settle(back, proposal, decision_of(torch.tensor([1, 0, 1])), index)
    assert contents() != first
    found = index.search(np.eye(4, dtype=np.float32), 1, 2)
    assert [hits[0].tokens.tolist() for hits in (found[0], found[2])] == [[0], [2]]
    assert len(index) == 2
    index.close()


def test_memory_tokens_are_committed_row_by_row() -> None:
    controller, ids = make(), chunks(2, 1)
    episode = controller.begin(2, torch.tensor([[1, 2], [3, 4]]))
    proposal = controller.propose(episode, ids[:, 0])
    written = proposal.after._replace(memory_BM=torch.tensor([[5, 6], [7, 8]]))
    after = controller.settle(episode, proposal._replace(after=written), decision_of(torch.tensor([0, 1])))
    assert after.memory_BM is not None
    assert after.memory_BM.tolist() == [[1, 2], [7, 8]]


def test_decisions() -> None:
    heads = ControllerHeads(2, 2)
    end = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    with torch.no_grad():
        heads.accept.weight.copy_(torch.tensor([[1.0, -1.0], [0.5, 2.0]]))
        heads.value.weight.copy_(torch.tensor([[0.0, 1.0], [0.3, 0.9], [0.0, 0.0]]))
    assert action_of(by_head(heads)(end)).tolist() == [1, 2, 1]  # logits [1, .5], [-1, 2], [0, -2.5]
    assert action_of(by_head(heads, 0.5)(end)).tolist() == [1, 2, 0]
    assert action_of(by_value(heads)(end)).tolist() == [1, 0, 2]  # less rolling back: [.3, 0], [-.1, -1], [-.2, 1]
    assert action_of(by_value(heads, -0.2)(end)).tolist() == [1, 1, 2]
    logits = torch.tensor([[0.0, 1.0, 0.5], [0.0, -1.0, 2.0], [0.0, 0.0, -2.5]])
    torch.testing.assert_close(heads.log_probs(end, 0.5), (logits / 0.5).log_softmax(-1))
    many = end[:1].expand(20_000, 2)
    drawn, again = (sampled(heads, torch.Generator().manual_seed(5))(many) for _ in range(2))
    assert torch.equal(action_of(drawn), action_of(again))
    shares = torch.bincount(action_of(drawn), minlength=3) / len(many)
    # 5 standard deviations of a share of 20,000 draws, at most sqrt(1 / 4 / 20,000) each
    assert (shares - logits[0].softmax(-1)).abs().max() < 5 * (0.25 / len(many)) ** 0.5
    new = ControllerHeads(2, 3)
    torch.testing.assert_close(new.log_probs(end), torch.full((3, 4), 0.25).log())
