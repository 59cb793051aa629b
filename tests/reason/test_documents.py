"""Documents with questions: from files and from tasks, cut into chunks, and as demonstrations."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="needs pydantic, which is not installed")
import torch

from cdrmix.config import schema_data
from cdrmix.config.schema import Config
from cdrmix.config.schema_reasoning import EpisodesOfDocuments, QuestionFiles
from cdrmix.data.tasks import make_example
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError, CorpusError
from cdrmix.reason.agent.agent import Window
from cdrmix.reason.agent.imitation import demonstrate, demonstrate_memories
from cdrmix.reason.chunking import chunk_bounds
from cdrmix.reason.documents import FileDocuments, TaskDocuments
from cdrmix.reason.episodes import FIRST_HELD_OUT, by_length, chunk_counts
from cdrmix.reason.session import cut
from cdrmix.reason.sources import check_episodes, fingerprint_of_questions, source_of

Write = Callable[..., Path]
CHUNK = 32


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    texts = [make_example("recall", 1, number, 2000).text for number in range(100)]
    return TextTokenizer.train(texts, vocab_size=600, end_of_text="<|endoftext|>")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(*rows)`: a file with these rows; a string is a line as it is."""

    def file(*rows: dict[str, Any] | str, name: str = "questions.jsonl") -> Path:
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return file


def row_of(number: int, **changes: Any) -> dict[str, Any]:
    fact = f"The code of Dukuro is {1000 + number}."
    filler = "The yellow river waited beyond the letter. " * (1 + number % 5)
    row = {"context": f"{filler}{fact} {filler}".strip(), "question": "What is the code of Dukuro?"}
    return {**row, "answers": [str(1000 + number)], "facts": [fact], **changes}


def source(path: Path, tokenizer: TextTokenizer, **changes: Any) -> FileDocuments:
    section = EpisodesOfDocuments(data=QuestionFiles(kind="jsonl", paths=[str(path)], held_out=0.3), **changes)
    made = source_of(section, CHUNK, tokenizer)
    assert isinstance(made, FileDocuments)
    return made


def test_chunks_are_the_document_and_hold_its_facts(write: Write, tokenizer: TextTokenizer) -> None:
    rows = [row_of(number) for number in range(40)]
    made = source(write(*rows), tokenizer, chunks=8)
    by_question = {row["answers"][0]: row for row in rows}
    assert 0 < made.held_out < 40
    seen = []
    for first, count in ((0, 40 - made.held_out), (FIRST_HELD_OUT, made.held_out)):
        numbers = range(first, first + count)
        episodes = made.batch(numbers, 8)
        for place, asked in enumerate(made.questions(numbers, 8)):
            row = by_question[asked.answers[0]]
            seen.append(asked.answers[0])
            assert made.text(episodes.chunks_BNC[place].flatten().tolist()) == row["context"]
            assert made.text(episodes.question_BQ[place].tolist()) == row["question"]
            assert made.text(episodes.answer_BA[place].tolist()) == row["answers"][0]
            assert made.text(episodes.facts_BFW[place, 0].tolist()) == row["facts"][0]
            chunk = int(episodes.fact_chunk_BF[place, 0])
            if first == 0:  # the first chunk is as short as that needs
                assert row["facts"][0] in made.text(episodes.chunks_BNC[place, chunk].tolist())
            else:  # cut as a session cuts, and the chunk is the one in which the fact ends
                pieces = [[token for token in ids if token != made.pad] for ids in episodes.chunks_BNC[place].tolist()]
                pieces = [ids for ids in pieces if ids]
                assert pieces == list(cut(tokenizer, row["context"], CHUNK))
                assert row["facts"][0] in made.text([token for ids in pieces[: chunk + 1] for token in ids])
                assert row["facts"][0] not in made.text([token for ids in pieces[:chunk] for token in ids])
    assert sorted(seen) == sorted(by_question), (
        "an epoch has every document that is trained on once, others are held out"
    )


@pytest.mark.parametrize("demonstrated", ["facts", "notes"])
def test_a_long_fact_lies_in_one_chunk(demonstrated: str, write: Write, tokenizer: TextTokenizer) -> None:
    """A fact among text without full stops may lie in two chunks of the plain cut, and lies in one of the training."""

    def long_row(number: int) -> dict[str, Any]:
        fact = f"The old garden and the yellow river and the broken lamp are {1000 + number}"
        filler = "The river turned beside the letter " * (1 + number % 4)
        given = {"facts": [fact]} if demonstrated == "facts" else {"notes": [{"passage": fact, "memory": "A fact."}]}
        return {**row_of(number), "context": f"{filler}{fact} {filler}".strip(), "facts": [], **given}

    made = source(write(*(long_row(number) for number in range(40))), tokenizer, chunks=8)
    split = 0
    for number in range(40 - made.held_out):
        document, episodes = made.document(number, 8), made.batch([number], 8)
        memories = made.memories([number], 8)
        fact = document.facts[0] if document.notes is None else document.notes[0].passage
        place = (
            int(episodes.fact_chunk_BF[0, 0])
            if memories is None
            else int((memories[0] != made.pad).any(1).int().argmax())
        )
        assert fact in made.text(episodes.chunks_BNC[0, place].tolist())
        split += not any(fact in tokenizer.decode(ids) for ids in cut(tokenizer, document.context, CHUNK))
    assert split > 0


def test_a_batch_has_no_effect_on_its_documents(write: Write, tokenizer: TextTokenizer) -> None:
    """What imitation demonstrates of a document, and what fast weights read of it, is the same in any batch."""
    made = source(write(*(row_of(number) for number in range(40))), tokenizer, chunks=8)
    window, numbers = window_of(made), range(12)
    together = made.batch(numbers, 8)
    _, answers = demonstrate(window, together, 0.0, torch.Generator())
    parts = by_length(together, made.pad)
    order = chunk_counts(together.chunks_BNC, made.pad).argsort(stable=True).tolist()
    for row, chunks_NC in zip(order, [chunks_NC for part in parts for chunks_NC in part.chunks_BNC], strict=True):
        alone = made.batch([row], 8)
        assert torch.equal(chunks_NC, alone.chunks_BNC[0])
        _, alone_answers = demonstrate(window, alone, 0.0, torch.Generator())
        assert torch.equal(answers.prompts_SL[row], alone_answers.prompts_SL[0])
    assert len(parts) > 1


def test_facts_of_any_length_share_a_memory(write: Write, tokenizer: TextTokenizer) -> None:
    """Two facts of which one is short fit a memory of as many tokens as they have, whatever is beside them."""
    short, long = "It is 7.", "The yellow river waited beyond the letter and the old garden."
    context = f"{short} The lamp. {long}"
    size = sum(len(tokenizer.encode(f" {fact}")) for fact in (short, long))
    assert size < 2 * len(tokenizer.encode(f" {long}"))
    made = source(write(*(row_of(n, context=f"{context} {n}", facts=[short, long]) for n in range(20))), tokenizer)
    episodes = made.batch([0], 4)
    for memory, complete in ((size, True), (size - 1, False)):
        _, answers = demonstrate(window_of(made, memory), episodes, 0.0, torch.Generator())
        assert bool(answers.mask_SN.any()) == complete


def test_epochs_have_orders_of_their_own(write: Write, tokenizer: TextTokenizer) -> None:
    made = source(write(*(row_of(number) for number in range(40))), tokenizer, chunks=8)
    count = 40 - made.held_out
    epochs = [[made.document(epoch * count + place, 8).answers for place in range(count)] for epoch in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1


def test_questions_about_one_document_are_held_out_together(write: Write, tokenizer: TextTokenizer) -> None:
    rows = [row_of(number, question=f"What is asked {asked}?") for number in range(30) for asked in range(3)]
    made = source(write(*rows), tokenizer, chunks=8)
    train = {made.document(number, 8).context for number in range(90 - made.held_out)}
    held_out = {made.document(FIRST_HELD_OUT + number, 8).context for number in range(made.held_out)}
    assert not train & held_out


MISTAKES: dict[str, tuple[dict[str, Any] | str, str]] = {
    "no JSON": ("{", r"questions.jsonl:3 is not JSON"),
    "a list": ("[]", r"questions.jsonl:3 is a JSON list, not an object"),
    "no context": (row_of(0, context=" "), r":3 must have a text in the field 'context' \(found \" \"\)"),
    "no question": ({"context": "a", "answers": ["b"]}, r":3 must have a text in the field 'question' \(found no such"),
    "no answers": (row_of(0, answers=[]), r":3 must have a text or a list of texts in the field 'answers'"),
    "a number": (row_of(0, answers=[7]), r":3 must have a text or a list of texts in the field 'answers'"),
    "an invented fact": (row_of(0, facts=["It rains."]), r':3 has the fact "It rains.", which is no passage'),
    "facts in one text": (row_of(0, facts="It rains."), r":3 must have a list of texts in the field 'facts'"),
    "notes in one text": (
        row_of(0, notes="none"),
        r":3 must have a list of objects with the texts passage and memory in the field 'notes'",
    ),
    "a note without a memory": (row_of(0, notes=[{"passage": "The"}]), r":3 must have a list of objects"),
    "notes in another order": (
        row_of(0, context="One. Two.", facts=[], notes=[{"passage": each, "memory": ""} for each in ("Two.", "One.")]),
        r':3 has a note with the passage "One.", which is not in its context after the passages of the notes before',
    ),
    "half a letter": (
        '{"context": "a \\ud800", "question": "b", "answers": ["a"]}',
        r":3 must have a text in the field",
    ),
    "facts that are none": (row_of(0, facts=False), r":3 must have a list of texts in the field 'facts'"),
    "some notes": (row_of(0, notes=[]), r":1 has no list in the field 'notes', which other rows have"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_file_is_named_with_its_line(name: str, write: Write, tokenizer: TextTokenizer) -> None:
    row, message = MISTAKES[name]
    path = write(*(row_of(number) for number in range(2)), row, *(row_of(number) for number in range(20)))
    with pytest.raises(CorpusError, match=message):
        source(path, tokenizer).batch([0], 4)


def test_a_file_that_is_not_there_is_named(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    with pytest.raises(CorpusError, match=r"reasoning: data.paths: nothing is at .*none.jsonl"):
        source(tmp_path / "none.jsonl", tokenizer).batch([0], 4)


WIDE: dict[str, tuple[dict[str, Any], str]] = {
    "question": ({"question": "What " * 70 + "?"}, r"the question has \d+ tokens; raise question_tokens=64"),
    "answer": ({"answers": ["1234 " * 40]}, r"the answer has \d+ tokens; raise answer_tokens=64"),
    "document": (
        {"context": "The river. " * 200 + row_of(3)["facts"][0]},
        r"the document has \d+ chunks .* raise chunks=8",
    ),
    "no demonstration": ({"facts": []}, r"the phase imitation needs facts"),
    "memory": (
        {"context": "ab " * 30, "facts": ["ab " * 29]},
        r"the facts have \d+ tokens, a turn writes 24; raise reasoning.memory.tokens",
    ),
}


@pytest.mark.parametrize("name", WIDE)
def test_all_documents_are_checked_before_training(name: str, write: Write, tokenizer: TextTokenizer) -> None:
    changes, message = WIDE[name]
    path = write(*(row_of(number) for number in range(20)), row_of(3, **changes), row_of(3, **changes))
    data = f"{{chunks: 8, data: {{kind: jsonl, paths: [{path}]}}}}"
    overrides = [f"reasoning.agent={data}", "reasoning.phases.imitation.steps=1"]
    config = Config.from_yaml("configs/cdrmix-reason-tiny.yaml", overrides)
    with pytest.raises(
        ConfigError, match=rf"reasoning.agent, an episode of 8 chunks: .*questions.jsonl:2[12]: {message}"
    ):
        check_episodes(config, tokenizer)


def test_a_fact_that_the_tokenizer_changes_is_refused(write: Write) -> None:
    texts = [make_example("recall", 1, number, 2000).text for number in range(20)]
    tokenizer = TextTokenizer.train(texts, vocab_size=400, end_of_text="<|endoftext|>", nfkc=True)
    fact = "The code of Dukuro is \u2460."  # a circled digit
    path = write(*(row_of(number) for number in range(20)), row_of(3, context=f"It is so. {fact}", facts=[fact]))
    made = source(path, tokenizer)
    with pytest.raises(ConfigError, match=r"questions.jsonl:21: the tokenizer changes the fact 'The code of Dukuro is"):
        made.check(8, demonstrated=True, memory=64)
    made.check(8)


def test_a_fact_that_no_chunk_has_is_refused(write: Write, tokenizer: TextTokenizer) -> None:
    fact = "Nothing " * 30 + "at all."
    made = source(write(*(row_of(number) for number in range(20)), row_of(3, context=fact, facts=[fact])), tokenizer)
    with pytest.raises(
        ConfigError, match=r"questions.jsonl:21: the fact .* has \d+ tokens, so no chunk has it as a whole"
    ):
        made.check(8, demonstrated=True, memory=400)
    made.check(8)


def test_phases_hold_the_same_documents_out(write: Write, tokenizer: TextTokenizer) -> None:
    path = write(*(row_of(number) for number in range(40)))
    overrides = [
        f"reasoning.{section}={{tokens: false, chunks: 8, data: {{kind: jsonl, paths: [{path}], held_out: {share}}}}}"
        for section, share in (("agent", 0.3), ("plasticity", 0.1))
    ]
    used = ["reasoning.phases.imitation.steps=1", "reasoning.phases.acceptance.steps=0"]
    with pytest.raises(ConfigError, match=r"held_out=0.1: \d+ documents are trained on by one and held out"):
        check_episodes(Config.from_yaml("configs/cdrmix-reason-tiny.yaml", [*overrides, *used]), tokenizer)
    other = write(
        *(row_of(number, context=f"Elsewhere. {row_of(number)['context']}") for number in range(40)), name="b.jsonl"
    )
    apart = [overrides[0], overrides[1].replace(str(path), str(other))]
    check_episodes(Config.from_yaml("configs/cdrmix-reason-tiny.yaml", [*apart, *used]), tokenizer)
    same = [each.replace("0.1", "0.3") for each in overrides]
    check_episodes(Config.from_yaml("configs/cdrmix-reason-tiny.yaml", [*same, *used]), tokenizer)


def test_a_task_that_fits_by_chance_is_refused(tokenizer: TextTokenizer) -> None:
    """Episode 0 fits, others do not."""
    config = Config.from_yaml("configs/cdrmix-reason-tiny.yaml", ["reasoning.phases.imitation.steps=1"])
    assert config.reasoning is not None
    agent = EpisodesOfDocuments(task="babilong_qa1", chunks=7, difficulty={"facts": 10})
    made = source_of(agent, CHUNK, tokenizer)
    made.batch([0], 7)
    reasoning = config.reasoning.model_copy(
        update={"agent": agent, "evaluation": config.reasoning.evaluation.model_copy(update={"chunks": [16]})}
    )
    with pytest.raises(
        ConfigError, match=r"reasoning.agent, an episode of 7 chunks: babilong_qa1 \d+: the document has"
    ):
        check_episodes(config.model_copy(update={"reasoning": reasoning}), tokenizer)


def test_documents_have_no_false_chunks_to_reject() -> None:
    overrides = ["reasoning.plasticity={task: recall, data: {kind: jsonl, paths: [a]}}", "reasoning.acceptance=null"]
    with pytest.raises(
        ConfigError, match=r"reasoning.plasticity.data: found a section\n.*chunks of which some are false"
    ):
        Config.from_yaml("configs/cdrmix-reason-tiny.yaml", overrides)


def test_windows_are_as_wide_as_the_configuration_says(write: Write, tokenizer: TextTokenizer) -> None:
    """A question of 60 tokens and an answer of 100."""
    question, answer = "What is this? " * 12, "9 8 7 6 5 4 3 2 1 0 " * 5
    made = source(
        write(*(row_of(number, question=question, answers=[answer]) for number in range(20))),
        tokenizer,
        chunks=8,
        question_tokens=128,
        answer_tokens=128,
    )
    assert len(tokenizer.encode(f" {question}")) > 60
    assert len(tokenizer.encode(f" {answer}")) >= 100
    episodes = made.batch([0], 8)
    assert made.text(episodes.question_BQ[0].tolist()) == question.strip()
    assert made.text(episodes.answer_BA[0].tolist()) == answer.strip()


def window_of(made: FileDocuments, memory: int = 40) -> Window:
    return Window(made.question, memory, 1, made.chunk, made.answer, made.pad, made.marks)


def test_a_chunk_that_a_short_document_lacks_is_not_demonstrated(write: Write, tokenizer: TextTokenizer) -> None:
    made = source(write(*(row_of(number) for number in range(40))), tokenizer, chunks=8)
    numbers = range(40 - made.held_out)
    episodes = made.batch(numbers, 8)
    turns, answers = demonstrate(window_of(made), episodes, 0.0, torch.Generator())
    read_NB = (episodes.chunks_BNC != made.pad).any(2).T
    assert not read_NB.all()
    assert torch.equal(turns.mask_SN.any(1), read_NB.flatten())
    assert answers.mask_SN.any(1).all()
    lost = episodes._replace(fact_chunk_BF=torch.full_like(episodes.fact_chunk_BF, -1))
    assert not demonstrate(window_of(made), lost, 0.0, torch.Generator())[1].mask_SN.any(), "no answer without the fact"


def test_notes_are_demonstrated_after_their_passages(write: Write, tokenizer: TextTokenizer) -> None:
    """The memory after a chunk is that of the last passage that has ended, also of two equal passages."""

    def with_notes(number: int) -> dict[str, Any]:
        row = row_of(number)
        context = f"{row['context']} It rains. The old lamp waited near the river. It rains."
        notes = [*row["facts"], "It rains.", "It rains."]
        memories = [f"{number} facts {count}" for count in range(1, len(row["facts"]) + 1)]
        memories += [f"{number} rain", f"{number} rain again"]
        made = [{"passage": note, "memory": memory} for note, memory in zip(notes, memories, strict=True)]
        return {**row, "context": context, "notes": made, "facts": None}

    made = source(write(*(with_notes(number) for number in range(30))), tokenizer, chunks=9)
    numbers = range(30 - made.held_out)
    episodes, memories = made.batch(numbers, 9), made.memories(numbers, 9)
    assert memories is not None
    window = window_of(made)
    turns, answers = demonstrate_memories(window, episodes, memories)
    count = episodes.chunks_BNC.shape[1]
    for place, number in enumerate(numbers):
        document, read, shown = made.document(number, 9), "", ""
        assert document.notes is not None
        for chunk in range(count):
            sequence = chunk * len(numbers) + place
            ids = episodes.chunks_BNC[place, chunk]
            assert bool(turns.mask_SN[sequence].any()) == bool((ids != made.pad).any())
            if not turns.mask_SN[sequence].any():
                continue
            start = made.question + 2
            assert made.text(turns.prompts_SL[sequence, start : start + window.memory].tolist()) == shown
            read += tokenizer.decode(ids[ids != made.pad].tolist())
            end = 0
            for note in document.notes:
                end = read.find(note.passage, end)
                if end < 0:
                    break
                end, shown = end + len(note.passage), note.memory
            assert made.text(turns.targets_SN[sequence][turns.mask_SN[sequence]].tolist()) == shown
        assert read == document.context
        assert shown.endswith("rain again")
    assert answers.mask_SN.any(1).all()
    with pytest.raises(ConfigError, match=r"a demonstrated memory has .* tokens; make .*memory.tokens 4 larger"):
        demonstrate_memories(window_of(made, memory=4), episodes, memories)


def test_chunks_end_with_sentences(tokenizer: TextTokenizer) -> None:
    """No sentence of fewer tokens than half of a chunk lies in two chunks, and no token is lost."""
    longest = "Is it seven, or?"
    assert CHUNK / 4 < len(tokenizer.encode(longest)) < CHUNK / 2
    text = f"It is 7. {longest} Yes! One\nTwo. " * 40
    pieces = [tokenizer.token_bytes(token) for token in tokenizer.encode(text)]
    for first in (None, 5, 17):
        bounds = chunk_bounds(pieces, CHUNK, first)
        chunks = [b"".join(pieces[start:end]).decode() for start, end in pairwise(bounds)]
        assert "".join(chunks) == text
        assert all(0 < end - start <= CHUNK for start, end in pairwise(bounds))
        assert bounds[1] <= (first or CHUNK)
        assert all(chunk.rstrip(" ").endswith((".", "?", "!", "\n")) for chunk in chunks[bool(first) : -1])
    assert chunk_bounds([b"a"] * 70, CHUNK) == [0, 32, 64, 70], "without ends of sentences"
    assert chunk_bounds([], CHUNK) == [0]


@pytest.mark.parametrize("task", ["babilong_qa1", "ruler_niah_single_2", "recall"])
def test_a_task_without_chunks_is_cut_into_them(task: str, tokenizer: TextTokenizer) -> None:
    section = EpisodesOfDocuments(task=task, question_tokens=100, answer_tokens=64)
    made = source_of(section, CHUNK, tokenizer)
    assert isinstance(made, TaskDocuments)
    episodes = made.batch(range(3), 16)
    assert episodes.chunks_BNC.shape[1] <= 16
    assert (chunk_counts(episodes.chunks_BNC, made.pad) >= 12).all(), "about as long as asked for"
    for asked, question_Q in zip(made.questions(range(3), 16), episodes.question_BQ, strict=True):
        assert asked.question.endswith("?")
        assert made.text(question_Q.tolist()) == asked.question


@pytest.mark.parametrize("task", ["babilong_qa1", "ruler_niah_single_2"])
def test_a_fact_among_lines_of_code_lies_in_one_chunk(task: str, tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """The lines have no full stops, so that only their breaks say where a sentence begins."""
    (tmp_path / "code.py").write_text("\n".join(f"    part {number} = item" for number in range(1000)))
    section = EpisodesOfDocuments.model_validate(
        {"task": task, "filler": {"kind": "text", "paths": [str(tmp_path / "code.py")]}}
    )
    made = source_of(section, 2 * CHUNK, tokenizer)
    for number in range(FIRST_HELD_OUT, FIRST_HELD_OUT + 10):
        chunks_NC = made.batch([number], 16).chunks_BNC[0].tolist()
        read = "".join(tokenizer.decode([token for token in chunk if token != made.pad]) for chunk in chunks_NC)
        facts = re.findall(r"(?:(?:Agnes|Bruno|Clara|Edgar) \w+ to|The hidden number of \w+ is) [^.]+\.", read)
        assert facts
        whole = [fact for chunk in chunks_NC for fact in facts if fact in made.text(chunk)]
        assert set(whole) == set(facts)


def test_a_story_is_demonstrated_among_text_of_files(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """The last memory answers the question, and held-out documents have other filler than those of the training."""
    (tmp_path / "book.txt").write_text(" ".join(f"Line {number} of a book." for number in range(1000)))
    section = EpisodesOfDocuments.model_validate(
        {"task": "babilong_qa1", "filler": {"kind": "text", "paths": [str(tmp_path / "book.txt")]}}
    )
    made = source_of(section, CHUNK, tokenizer)
    for first, lines in ((0, range(900)), (FIRST_HELD_OUT, range(900, 1000))):
        numbers = range(first, first + 10)
        memories = made.memories(numbers, 16)
        assert memories is not None
        for place, asked in enumerate(made.questions(numbers, 16)):
            (person,) = re.findall(r"Where is (\w+)", asked.question)
            chunks_NC, read, rooms = made.batch([numbers[place]], 16).chunks_BNC[0].tolist(), [], []
            for chunk, memory in zip(chunks_NC, memories[place].tolist(), strict=False):
                read += chunk
                rooms = re.findall(rf"{person} \w+ to the (\w+)\.", made.text(read))
                assert made.text(memory) == (f"{person} {rooms[-1]}" if rooms else "")
            assert asked.answers == (rooms[-1],)
            assert {int(line) for line in re.findall(r"Line (\d+) of", made.text(read))} <= set(lines)
    (tmp_path / "short.txt").write_text("One.")
    short = section.model_copy(
        update={"filler": schema_data.TextSource(kind="text", paths=[str(tmp_path / "short.txt")])}
    )
    with pytest.raises(CorpusError, match=r"the filler, .*, has 1 sentences; give more text"):
        source_of(short, CHUNK, tokenizer).batch([0], 8)


def test_the_fingerprint_is_of_the_questions(write: Write) -> None:
    rows = [row_of(number) for number in range(20)]

    def fingerprint(path: Path) -> str | None:
        override = f"reasoning.agent={{data: {{kind: jsonl, paths: [{path}]}}}}"
        return fingerprint_of_questions(Config.from_yaml("configs/cdrmix-reason-tiny.yaml", [override]))

    first = fingerprint(write(*rows))
    assert first == fingerprint(write(*rows, name="other.jsonl"))
    assert first == fingerprint(write(*(dict(reversed(row.items())) for row in rows), name="order.jsonl"))
    assert first != fingerprint(write(*rows, row_of(3, question="What now?")))
    assert fingerprint_of_questions(Config.from_yaml("configs/cdrmix-reason-tiny.yaml")) is None
