"""Episodes: functions of their number; their answers follow from their chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cdrmix.config.schema import Config
from cdrmix.config.schema_reasoning import EpisodesOfTask
from cdrmix.data.tasks import IGNORED, Filler, make_example
from cdrmix.data.tasks import episodes as tokens
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError
from cdrmix.reason.episodes import FIRST_HELD_OUT, TextSource, TokenSource, by_length, chunk_counts
from cdrmix.reason.filler import Fillers
from cdrmix.reason.sources import check_episodes, source_of

KINDS = ["recall", "poisoned", "agent", "hops"]


def pairs_of(chunk: torch.Tensor, keys: int = 64) -> list[tuple[int, int]]:
    """Every pair in a chunk that begins with a key."""
    row = chunk.tolist()
    found = zip(row[::2], row[1::2], strict=True)
    return [pair for pair in found if tokens.FIRST_KEY <= pair[0] < tokens.FIRST_KEY + keys]


@pytest.mark.parametrize("kind", KINDS)
def test_an_episode_depends_on_its_number_alone(kind: str) -> None:
    source = TokenSource(kind, 1, 16, {})
    whole = source.batch([0, 7, FIRST_HELD_OUT], 6)
    alone = TokenSource(kind, 1, 16, {}).batch([FIRST_HELD_OUT], 6)
    for column, one in zip(whole, alone, strict=True):
        assert torch.equal(column[2:], one)
    other = TokenSource(kind, 2, 16, {}).batch([0, 7, FIRST_HELD_OUT], 6)
    assert not torch.equal(whole.chunks_BNC, other.chunks_BNC)
    assert not torch.equal(whole.chunks_BNC[0], whole.chunks_BNC[1])


def test_an_episode_is_the_same_on_every_machine() -> None:
    """Golden values: if they change, all recorded results belong to other episodes."""
    made = TokenSource("recall", 1, 16, {}).batch([0], 2)
    assert made.chunks_BNC[0, 0].tolist() == [51, 88, 79, 136, 41, 104, 75, 141, 61, 115, 73, 126, 68, 108, 27, 80]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_of_an_episode_stands_in_it(kind: str) -> None:
    source = TokenSource(kind, 3, 16, {})
    made = source.batch(range(50), 6)
    assert made.chunks_BNC.min() > 0
    assert made.chunks_BNC.max() < source.vocab_size
    for row in range(50):
        facts = [tuple(fact) for fact in made.facts_BFW[row].tolist()]
        for fact, chunk in zip(facts, made.fact_chunk_BF[row].tolist(), strict=True):
            assert fact in pairs_of(made.chunks_BNC[row, chunk])
            assert made.good_BN[row, chunk]
        told = dict(facts)
        assert len(told) == len(facts)
        answer = made.answer_BA[row].tolist()
        if kind == "hops":
            value = made.question_BQ[row, 0].item()
            for _ in range(2):
                value = told[value]
            assert [value] == answer
        else:
            asked = made.question_BQ[row].tolist()
            keys = asked[::2] if source.probed else asked
            assert [told[key] for key in keys] == answer
            assert sorted(keys) == sorted(key for key, wanted in zip(told, made.asked_BF[row], strict=True) if wanted)


@pytest.mark.parametrize("kind", ["recall", "agent", "hops"])
def test_nothing_contradicts_a_fact(kind: str) -> None:
    made = TokenSource(kind, 3, 16, {}).batch(range(50), 6)
    for row in range(50):
        told = dict(made.facts_BFW[row].tolist())
        for chunk in made.chunks_BNC[row]:
            assert all(told[key] == value for key, value in pairs_of(chunk) if key in told)


def test_bad_chunks_lie_about_the_same_keys_and_say_so_at_their_end() -> None:
    made = TokenSource("poisoned", 3, 16, {}).batch(range(50), 6)
    assert made.good_BN.sum(1).tolist() == [2] * 50
    assert torch.equal(made.chunks_BNC[:, :, -1] == tokens.BAD, ~made.good_BN)
    assert (made.chunks_BNC == tokens.BAD).sum() == (~made.good_BN).sum()
    for row in range(50):
        told = dict(made.facts_BFW[row].tolist())
        for chunk, good in zip(made.chunks_BNC[row], made.good_BN[row].tolist(), strict=True):
            pairs = pairs_of(chunk)
            assert len({key for key, _ in pairs}) == len(pairs) == (4 if good else 7)
            assert all((told[key] == value) is good for key, value in pairs)


def test_draws_are_even() -> None:
    """Chi-square of 64 keys at 1/64 over 51,200 draws: 63 degrees, mean 63, deviation sqrt(126) = 11.2; 6 of them."""
    made = TokenSource("recall", 5, 16, {}).batch(range(6400), 1)
    for column in (made.facts_BFW[..., 0] - tokens.FIRST_KEY, made.facts_BFW[..., 1] - tokens.FIRST_KEY - 64):
        counts = torch.bincount(column.flatten(), minlength=64).double()
        assert ((counts - 800) ** 2 / 800).sum() < 63 + 6 * 11.2


@pytest.mark.parametrize(
    ("kind", "difficulty", "chunks", "said"),
    [
        ("recall", {"pairs": 9}, 1, "at most 8"),
        ("recall", {"pairs": 65}, 9, "at most 64"),
        ("recall", {"pair": 9}, 1, "did you mean 'pairs'"),
        ("poisoned", {"good": 3}, 2, "at most 2"),
        ("agent", {"pairs": 9}, 1, "at most 8"),
        ("hops", {"chains": 5}, 1, "at most 8"),
        ("recal", {}, 1, "no token episodes 'recal'"),
    ],
)
def test_what_does_not_fit_is_refused(kind: str, difficulty: dict[str, Any], chunks: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TokenSource(kind, 1, 16, difficulty).batch([0], chunks)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    texts = [make_example("recall", 1, number, 2000).text for number in range(100)]
    return TextTokenizer.train(texts, vocab_size=600, end_of_text="<|endoftext|>")


def test_text_episodes_keep_their_facts_and_fit(tokenizer: TextTokenizer) -> None:
    source = TextSource("chunk_recall", 1, 64, {"pairs": 4}, tokenizer)
    made = source.batch(range(12), 5)
    assert made.chunks_BNC.shape == (12, 5, 64)
    marks = {source.pad, *source.marks}
    assert len(marks) == 7
    for row in range(12):
        for fact, chunk in zip(made.facts_BFW[row], made.fact_chunk_BF[row].tolist(), strict=True):
            key, value = tokenizer.decode([each for each in fact.tolist() if each != source.pad]).split()
            ids = [each for each in made.chunks_BNC[row, chunk].tolist() if each not in marks]
            assert f"The code of {key} is {value}." in tokenizer.decode(ids)
    again = TextSource("chunk_recall", 1, 64, {"pairs": 4}, tokenizer).batch([7], 5)
    assert all(torch.equal(one[7], two[0]) for one, two in zip(made, again, strict=True))
    with pytest.raises(ConfigError, match="do not fit chunks of 12 tokens"):
        TextSource("chunk_recall", 1, 12, {"pairs": 40}, tokenizer).batch([0], 1)


def test_no_chunk_is_empty_and_none_is_lost_behind_one(tokenizer: TextTokenizer) -> None:
    """Also where every sentence between the facts is longer than a chunk."""
    long = " ".join(["river"] * 60) + "."
    source = TextSource(
        "chunk_recall", 1, 32, {"pairs": 2}, tokenizer, Fillers(Filler([long] * 50), Filler([long] * 50))
    )
    made = source.batch(range(12), 8)
    has_tokens_BN = (made.chunks_BNC != source.pad).any(2)
    assert has_tokens_BN.all()
    made.chunks_BNC[3, 2] = source.pad
    made.chunks_BNC[5, 6:] = source.pad
    assert chunk_counts(made.chunks_BNC, source.pad).tolist() == [8, 8, 8, 8, 8, 6, *[8] * 6]
    short, whole = by_length(made, source.pad)
    assert short.chunks_BNC.shape[:2] == (1, 6)
    assert whole.chunks_BNC.shape[:2] == (11, 8)


def test_lines_of_code_are_sentences_of_their_own(tokenizer: TextTokenizer) -> None:
    """Joined to a fact they would be one sentence with it, which fits no chunk."""
    lines = [f"value_{number} = compute(value_{number}, other, more)" for number in range(40)]
    source = TextSource("chunk_recall", 1, 64, {"pairs": 2}, tokenizer, Fillers(Filler(lines), Filler(lines)))
    made = source.batch(range(6), 4)
    for row in range(6):
        for fact, chunk in zip(made.facts_BFW[row], made.fact_chunk_BF[row].tolist(), strict=True):
            key, value = source.text(fact.tolist()).split()
            assert f"The code of {key} is {value}." in source.text(made.chunks_BNC[row, chunk].tolist())


def test_no_text_holds_a_mark(tokenizer: TextTokenizer) -> None:
    source = TextSource("chunk_recall", 1, 64, {}, tokenizer)
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000), 0x10FFFF]))
    assert not {source.pad, *source.marks} & set(tokenizer.encode(text))


def test_a_probe_asks_for_the_answer(tokenizer: TextTokenizer) -> None:
    source = TextSource("chunk_recall", 1, 64, {}, tokenizer)
    made = source.batch(range(8), 3)
    probe = source.probe(made)
    for row in range(8):
        wanted = [each for each in made.answer_BA[row].tolist() if each != source.pad] + [source.marks.end]
        targets = probe.targets_BT[row]
        assert targets[targets != IGNORED].tolist() == wanted
        places = (targets != IGNORED).nonzero().flatten()
        assert probe.ids_BT[row, places[0]] == source.marks.answer
        assert torch.equal(probe.ids_BT[row, places[1:]], targets[places[:-1]])  # teacher forcing: shifted by one


def test_a_source_is_made_of_its_section() -> None:
    section = EpisodesOfTask(task="agent", tokens=True, difficulty={"pairs": 3}, seed=4)
    assert source_of(section, 16).batch([0], 2).facts_BFW.shape == (1, 3, 2)
    with pytest.raises(ConfigError, match="no tokenizer"):
        source_of(EpisodesOfTask(task="chunk_recall"), 16)


MISTAKES = {
    "no such task": ("reasoning.agent.task=riddles", "reasoning.agent, an episode of 3 chunks: .*riddles"),
    "text without chunks": ("reasoning.operations.task=sorting", "reasoning.operations, .*no chunks"),
    "no such task of a phase that is replayed alone": (
        "reasoning={agent: {task: riddles}, phases: {imitation: {steps: 0}, plasticity: {replay: [imitation]}}}",
        "reasoning.agent, an episode of 3 chunks: .*riddles",
    ),
    "only lies": ("reasoning.agent={task: poisoned_recall, difficulty: {bad: 4}}", "of 3 chunks: .*bad = 4"),
    "too few chunks to evaluate": ("reasoning.evaluation.chunks=[1]", "reasoning.acceptance, an episode of 1 chunks"),
    "a vocabulary of its own that is too large": ("model.vocab_size=260", "has .* ids; model.vocab_size is 260"),
    "chunks too short": ("reasoning.agent.difficulty={pairs: 90}", "do not fit chunks of 32 tokens"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_episodes_that_cannot_be_made_are_found_at_once(name: str, tokenizer: TextTokenizer) -> None:
    override, message = MISTAKES[name]
    overrides = ["reasoning.plasticity.difficulty={keys: 128}", "reasoning.phases.imitation.steps=1", override]
    with pytest.raises(ConfigError, match=message):
        check_episodes(Config.from_yaml("configs/cdrmix-reason-tiny.yaml", overrides), tokenizer)


def test_shipped_episodes_can_be_made(tokenizer: TextTokenizer) -> None:
    check_episodes(Config.from_yaml("configs/cdrmix-reason-tiny.yaml"), tokenizer)
    for size in ("1b", "4b", "40b", "200b"):
        check_episodes(Config.from_yaml(f"configs/cdrmix-reason-{size}.yaml"))
