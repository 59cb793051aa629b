"""The memory agent: its windows, its memory of parts, its rewards, and the teacher's demonstrations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cdrmix.config.schema_layers import FeedForward
from cdrmix.config.schema_model import Attention, Model, Rwkv
from cdrmix.config.schema_reasoning import Rl
from cdrmix.errors import ConfigError
from cdrmix.model.language_model import LanguageModel
from cdrmix.reason.agent import agent
from cdrmix.reason.agent.agent import Reading, TokenMemory, Window, evaluate, holds, read_episodes, rewards_of
from cdrmix.reason.agent.imitation import demonstrate
from cdrmix.reason.episodes import Episodes, Marks, TokenSource
from cdrmix.reason.rl.rollout import Generated, taken

PAD = 0
MARKS = Marks(1, 2, 3, 4, 5, 6)
RL = Rl(horizon=64, latency_weight=0.01, stability_weight=0.1)


def small_model(attention_fraction: float = 0.5) -> LanguageModel:
    torch.manual_seed(4)
    config = Model(
        vocab_size=208,
        d_model=32,
        layers=2,
        attention_fraction=attention_fraction,
        attention=Attention(heads=2, kv_heads=2),
        rwkv=Rwkv(head_size=16, decay_rank=4, iclr_rank=4, value_rank=4, gate_rank=4),
        feed_forward=FeedForward(kind="channel_mix", hidden=48),
    )
    model = LanguageModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def source() -> TokenSource:
    return TokenSource("agent", 3, 16, {"pairs": 4, "queries": 2})


def window_of(memory: int = 4, heads: int = 1) -> Window:
    one = source()
    return Window(one.question, memory, heads, one.chunk, one.answer, one.pad, one.marks)


def test_the_published_cell_has_a_window_of_thirty_tokens() -> None:
    assert window_of().length == 30


def test_a_memory_of_one_part_is_written_over() -> None:
    memory = TokenMemory.empty(window_of(), 2, torch.device("cpu"))
    memory = memory.write(torch.tensor([[7, 8, 0, 0], [0, 0, 0, 0]]), 1)
    assert memory.shown().tolist() == [[7, 8, 0, 0], [0, 0, 0, 0]]
    assert memory.changed_BH.tolist() == [[1], [0]]
    assert memory.write(torch.tensor([[9, 0, 0, 0], [7, 0, 0, 0]]), 2).shown().tolist() == [[9, 0, 0, 0], [7, 0, 0, 0]]


def test_the_part_that_has_not_changed_for_longest_is_written() -> None:
    """The part that changed last stands first; a part that a turn writes unchanged is written again by the next."""
    memory = TokenMemory.empty(window_of(6, 3), 1, torch.device("cpu"))

    def write(part: list[int], turn: int) -> list[int]:
        nonlocal memory
        memory = memory.write(torch.tensor([part]), turn)
        return memory.shown().tolist()[0]

    assert write([11, 12], 1) == [11, 12, 0, 0, 0, 0]
    assert write([0, 0], 2) == [11, 12, 0, 0, 0, 0]
    assert write([21, 22], 3) == [21, 22, 11, 12, 0, 0]
    assert write([31, 32], 4) == [31, 32, 21, 22, 11, 12]
    assert write([11, 12], 5) == [31, 32, 21, 22, 11, 12]
    assert write([41, 42], 6) == [41, 42, 31, 32, 21, 22]


def test_a_fact_is_held_by_one_part_whole() -> None:
    parts = torch.tensor([[[7, 8, 9, 0], [5, 6, 7, 8]]])
    facts = torch.tensor([[[7, 8, 0], [8, 9, 0], [9, 0, 0], [9, 5, 0], [7, 8, 9], [6, 8, 0], [0, 0, 0], [8, 0, 0]]])
    assert holds(parts, facts, PAD).tolist() == [[True, True, True, False, True, False, False, True]]


def teacher(monkeypatch: pytest.MonkeyPatch, window: Window, episodes: Episodes) -> list[Tensor]:
    """Makes the agent write the demonstrated tokens; returns the prompts that it reads."""
    demonstrations = demonstrate(window, episodes, 0.0, torch.Generator())
    texts = [*demonstrations[0].targets_SN.chunk(episodes.chunks_BNC.shape[1]), demonstrations[1].targets_SN]
    masks = [*demonstrations[0].mask_SN.chunk(episodes.chunks_BNC.shape[1]), demonstrations[1].mask_SN]
    said = iter(zip(texts, masks, strict=True))

    def decode(*_: object, **__: object) -> Generated:
        text, mask = next(said)
        return Generated(text, torch.zeros(text.shape), mask)

    monkeypatch.setattr(agent, "decode", decode)
    prompts = [*demonstrations[0].prompts_SL.chunk(episodes.chunks_BNC.shape[1]), demonstrations[1].prompts_SL]
    return list(prompts)


@pytest.mark.parametrize(("memory", "heads"), [(4, 1), (8, 2), (6, 3), (9, 3)])
def test_who_writes_as_the_teacher_does_answers_everything(
    monkeypatch: pytest.MonkeyPatch, memory: int, heads: int
) -> None:
    """Demonstrations and rollouts see the same windows; all is captured, all is kept, all is answered."""
    window, episodes = window_of(memory, heads), source().batch(range(40), 5)
    prompts = teacher(monkeypatch, window, episodes)
    reading = read_episodes(
        small_model(), window, episodes, temperature=0.0, generator=torch.Generator(), step_budget=64, keep_turns=True
    )
    assert len(reading.turns) == 6
    for turn, prompt in zip(reading.turns, prompts, strict=True):
        assert torch.equal(turn.prompt_BL, prompt)
    if heads == 1 or memory // heads >= 4:  # both facts of a chunk fit one part
        assert reading.exact_B.all()
        assert (reading.matched_B == 1).all()
        assert torch.equal(reading.captured_BF, episodes.asked_BF)
        assert torch.equal(reading.held_BF, episodes.asked_BF)
    else:
        assert torch.equal(reading.captured_BF & ~reading.held_BF, torch.zeros_like(episodes.asked_BF))
        assert int((episodes.asked_BF & ~reading.captured_BF).sum()) > 0, "two facts of one chunk do not fit"
    told_in = episodes.fact_chunk_BF[:, :2]
    assert torch.equal(reading.changes_B, 1 + (told_in[:, 0] != told_in[:, 1]).long())


def test_a_leak_loses_one_fact_of_the_demonstration_and_none_of_the_teacher() -> None:
    window, episodes = window_of(), source().batch(range(400), 4)
    whole = demonstrate(window, episodes, 0.0, torch.Generator())
    leaky = demonstrate(window, episodes, 0.5, torch.Generator().manual_seed(1))
    assert torch.equal(whole[0].prompts_SL, leaky[0].prompts_SL)
    assert all(torch.equal(x, y) for x, y in zip(whole[1], leaky[1], strict=True))
    begin = window.question + 2
    holding = (whole[0].prompts_SL[:, begin : begin + window.memory] != PAD).any(1)
    changed = (whole[0].targets_SN != leaky[0].targets_SN).any(1)
    assert not (changed & ~holding).any()
    share = changed[holding].double().mean()
    assert abs(share - 0.5) < 4 * (0.25 / int(holding.sum())) ** 0.5
    lengths = [((part.targets_SN != PAD) & (part.targets_SN != MARKS.end)).sum(1) for part in (whole[0], leaky[0])]
    assert set((lengths[0] - lengths[1])[changed].tolist()) == {2}


def test_facts_of_one_chunk_are_written_in_its_order() -> None:
    """In about half of the chunks with both facts the second one asked for comes first."""
    episodes = source().batch(range(60), 1)
    written = demonstrate(window_of(), episodes, 0.0, torch.Generator())[0].targets_SN
    turned = 0
    for chunk, facts, text in zip(episodes.chunks_BNC[:, 0], episodes.facts_BFW[:, :2], written, strict=True):
        told = sorted(facts.tolist(), key=lambda fact: chunk.tolist().index(fact[0]))
        assert text.tolist() == [*told[0], *told[1]]
        turned += told != facts.tolist()
    assert 15 <= turned <= 45


def test_a_part_must_hold_a_fact() -> None:
    with pytest.raises(ConfigError, match="does not hold a fact of 2"):
        demonstrate(window_of(4, 4), source().batch(range(2), 4), 0.0, torch.Generator())


def test_groups_are_neighbours_that_read_the_same() -> None:
    window, episodes = window_of(), source().batch(range(3), 3)
    arguments: dict[str, Any] = {"temperature": 1.0, "group": 4, "step_budget": 64, "keep_turns": True}
    reading = read_episodes(small_model(), window, episodes, generator=torch.Generator().manual_seed(1), **arguments)
    begin = torch.cat([torch.full((3, 1), MARKS.question), episodes.question_BQ], 1).repeat_interleave(4, 0)
    for number, turn in enumerate(reading.turns):
        assert torch.equal(turn.prompt_BL[:, : begin.shape[1]], begin)
        if number < 3:
            chunk = episodes.chunks_BNC[:, number].repeat_interleave(4, 0)
            assert torch.equal(turn.prompt_BL[:, -17:-1], chunk)
        with torch.no_grad():
            logits = taken(small_model(), turn.prompt_BL, turn.generated.tokens_BN).logits_SNV
        found = logits.log_softmax(-1).gather(-1, turn.generated.tokens_BN.unsqueeze(-1)).squeeze(-1)
        mask = turn.generated.mask_BN
        torch.testing.assert_close(turn.generated.log_probs_BN[mask], found[mask], rtol=1e-4, atol=1e-4)


def reading_of(**changes: object) -> Reading:
    """Rollouts of two facts: all right; half right; nothing right, all facts held; all right without memory."""
    facts = torch.ones(4, 2, dtype=torch.bool)
    reading = Reading(
        (),
        TokenMemory(torch.zeros(4, 1, 4, dtype=torch.int64), torch.zeros(4, 1, dtype=torch.int64)),
        torch.zeros(4, 2, dtype=torch.int64),
        torch.tensor([1.0, 0.5, 0.0, 1.0], dtype=torch.float64),
        torch.tensor([True, False, False, True]),
        facts,
        torch.tensor([[True, True], [True, True], [True, True], [False, False]]),
        torch.tensor([[True, True], [True, False], [True, True], [False, False]]),
        torch.tensor([2, 8, 0, 64]),
    )
    return reading._replace(**changes)  # type: ignore[arg-type]


def test_rewards_by_hand() -> None:
    rewards = rewards_of(reading_of(), RL, 64)
    expected = [1 - 0.01 * 2 / 64 + 0.1, -0.01 * 8 / 64 + 0.1 * 0.5, 0.0, 1 - 0.01]
    torch.testing.assert_close(rewards.total_B, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15)
    assert rewards.task_B.tolist() == [1.0, 0.0, 0.0, 1.0]


def test_the_figures_of_an_evaluation_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the rollouts above: 6 of 8 facts captured, 5 of these held; 74 changes in 4 documents of 3 chunks."""
    monkeypatch.setattr(agent, "read_episodes", lambda *_, **__: reading_of())
    score = evaluate(small_model(), window_of(), source(), range(4), 3, step_budget=64)
    assert score == agent.Score(2.5 / 4, 2 / 4, 2.5 / 4, 6 / 8, 5 / 6, 74 / 12)


def test_of_one_chunk_nothing_is_left_out() -> None:
    """With the last chunk only, the agent's score is that of an episode of that chunk."""
    window, one = window_of(), source()
    model = small_model()
    whole = evaluate(model, window, one, range(50), 1, step_budget=8)
    last = evaluate(model, window, one, range(50), 1, step_budget=8, last_only=True)
    assert whole == last


def test_what_is_kept_does_not_grow_with_the_document() -> None:
    episodes = source().batch(range(2), 6)
    reading = read_episodes(
        small_model(), window_of(), episodes, temperature=0.0, generator=torch.Generator(), step_budget=64
    )
    assert reading.turns == ()


def test_a_memory_changes_as_often_as_the_step_budget_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that writes something new at every turn, but in row 0 at every second one alone; budget 2 of 6 chunks.

    Each row stops at its second change. When no row may change anything, the chunks that are left are not read.
    """
    window, calls = window_of(), 0

    def decode(model: object, prefix: object, tokens: int, **_: object) -> Generated:
        nonlocal calls
        calls += 1
        text = torch.full((2, tokens), 10 + calls)
        text[0] = 10 + calls // 2 if calls > 1 else PAD
        return Generated(text, torch.zeros(text.shape), torch.ones(text.shape, dtype=torch.bool))

    monkeypatch.setattr(agent, "decode", decode)
    episodes = source().batch(range(2), 6)
    reading = read_episodes(
        small_model(), window, episodes, temperature=0.0, generator=torch.Generator(), step_budget=2
    )
    assert reading.changes_B.tolist() == [2, 2]
    assert reading.memory.changed_BH.flatten().tolist() == [4, 2]
    assert reading.memory.shown()[:, 0].tolist() == [12, 12]
    assert calls == 4 + 1, "the fifth and the sixth chunk are not read; then the answer"
    budget_of_64 = {"temperature": 0.0, "generator": torch.Generator(), "step_budget": 64}
    assert read_episodes(small_model(), window, episodes, **budget_of_64).changes_B.tolist() != [2, 2]


def test_a_model_with_attention_reads_like_one_without_state() -> None:
    """The question is read once per episode; the growing cache of an attention model is not changed by later reads."""
    model: LanguageModel = small_model(attention_fraction=1.0)
    window, episodes = window_of(), source().batch(range(2), 3)
    reading = read_episodes(
        model, window, episodes, temperature=0.0, generator=torch.Generator(), step_budget=64, keep_turns=True
    )
    for turn in reading.turns:
        with torch.no_grad():
            logits = taken(model, turn.prompt_BL, turn.generated.tokens_BN).logits_SNV
        mask = turn.generated.mask_BN
        assert torch.equal(logits.argmax(-1)[mask], turn.generated.tokens_BN[mask])
