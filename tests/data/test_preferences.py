"""Pairs of answers: formats, what is dropped, generated tasks as conversations and pairs, held-out figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cdrmix.config.schema_data import ChatTasksSource, PreferencesSource, TaskPreferencesSource
from cdrmix.data.inspection import inspect
from cdrmix.data.loader import EvalLoader
from cdrmix.data.prepare import prepare
from cdrmix.data.shards import ShardSet, Split
from cdrmix.data.sources import make_source
from cdrmix.data.sources.base import BadRecord, BadRecords
from cdrmix.data.sources.chat import parse_pair
from cdrmix.data.sources.conversations import Conversation, Pair, from_json
from cdrmix.eval.perplexity import baselines

QUESTION = {"role": "user", "content": "Q"}
GOOD, BAD = ({"role": "assistant", "content": content} for content in ("good", "bad"))
SYSTEM = {"role": "system", "content": "S"}


def parse(record: object, **options: Any) -> Pair:
    section = PreferencesSource(kind="preferences", paths=["x"], **options)
    pair = from_json(parse_pair(json.dumps(record).encode(), section)[0])
    assert isinstance(pair, Pair)
    return pair


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Q", "chosen": "good", "rejected": "bad"},
        {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [QUESTION], "chosen": GOOD, "rejected": BAD},
        {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
        {"prompt": None, "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
        {"prompt": "Q", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
        {"prompt": [QUESTION], "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
        {"prompt": "Q", "chosen": "Q good", "rejected": "Q bad"},
        {"chosen": "\n\nHuman: Q\n\nAssistant: good", "rejected": "\n\nHuman: Q\n\nAssistant: bad"},
        {"chosen": "User: Q\n\nAssistant: good", "rejected": "User: Q\n\nAssistant: bad"},
        {"prompt": "\n\nHuman: Q\n\nAssistant:", "chosen": "good", "rejected": "bad"},
        {
            "prompt": "\n\nHuman: Q\n\nAssistant:",
            "chosen": "\n\nHuman: Q\n\nAssistant: good",
            "rejected": "\n\nHuman: Q\n\nAssistant: bad",
        },
        {
            "prompt": "Q",
            "chosen": "\n\nHuman: Q\n\nAssistant: good",
            "rejected": "\n\nHuman: Q\n\nAssistant: bad",
        },
    ],
)
def test_formats(record: dict[str, Any]) -> None:
    assert parse(record) == Pair(Conversation([QUESTION, GOOD]), Conversation([QUESTION, BAD]))
    assert parse(record, system="S").chosen.messages == [SYSTEM, QUESTION, GOOD]


OTHER = {"role": "system", "content": "T"}
EARLIER = [QUESTION, {"role": "assistant", "content": "A"}]
LAST = {"role": "user", "content": "R"}


@pytest.mark.parametrize(
    ("record", "before"),
    [
        ({"prompt": "Q", "chosen": [*EARLIER, LAST, GOOD], "rejected": [*EARLIER, LAST, BAD]}, [*EARLIER, LAST]),
        ({"prompt": "R", "chosen": [*EARLIER, LAST, GOOD], "rejected": [*EARLIER, LAST, BAD]}, [*EARLIER, LAST]),
        ({"prompt": EARLIER, "chosen": [LAST, GOOD], "rejected": [LAST, BAD]}, [*EARLIER, LAST]),
        ({"prompt": "Q", "chosen": [SYSTEM, QUESTION, GOOD], "rejected": [SYSTEM, QUESTION, BAD]}, [SYSTEM, QUESTION]),
        ({"prompt": [SYSTEM, QUESTION], "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}, [SYSTEM, QUESTION]),
        (
            {
                "chosen": "\n\nHuman: Q\n\nAssistant: A\n\nHuman: R\n\nAssistant: good",
                "rejected": "\n\nHuman: Q\n\nAssistant: A\n\nHuman: R\n\nAssistant: bad",
            },
            [*EARLIER, LAST],
        ),
    ],
)
def test_each_turn_is_there_once(record: dict[str, Any], before: list[dict[str, str]]) -> None:
    assert parse(record) == Pair(Conversation([*before, GOOD]), Conversation([*before, BAD]))


def test_an_answer_that_begins_by_chance_with_the_prompt_stays_whole() -> None:
    record = {"prompt": "a", "chosen": "apple", "rejected": "a pear"}
    assert [one.messages[-1]["content"] for one in vars(parse(record)).values()] == ["apple", "a pear"]
    record = {"prompt": "User: hello", "chosen": "User: x", "rejected": "y"}  # not the layout of a dialogue
    assert parse(record).chosen.messages[0]["content"] == "User: hello"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "Q", "chosen": "good"}, "has no field 'rejected'; its fields are: prompt"),
        ({"prompt": "Q", "chosen": "good", "rejected": [QUESTION]}, "does not end with a turn of the assistant"),
        ({"chosen": [QUESTION, GOOD], "rejected": [SYSTEM, QUESTION, BAD]}, "differ before the last turn"),
        (
            {"prompt": [OTHER, QUESTION], "chosen": [SYSTEM, QUESTION, GOOD], "rejected": [SYSTEM, QUESTION, BAD]},
            "the system prompt in its field 'prompt' is not that of its turns",
        ),
        (
            {"system": "T", "prompt": [SYSTEM, QUESTION], "chosen": [GOOD], "rejected": [BAD]},
            "the system prompt in its field 'system' is not that of its turns",
        ),
        (
            {"prompt": "Q", "chosen": "good", "rejected": "bad", "chat_template_kwargs": {"a": 1}},
            "chat_template_kwargs",
        ),
        ({"prompt": "Q", "chosen": 1, "rejected": "bad"}, "turn 2 is a number, not an object"),
        ({"chosen": "good", "rejected": "bad"}, "has no prompt: its field 'prompt' is missing or empty"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "has no prompt"),
        ({"prompt": "P", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}, "ends with a turn of the role user"),
        (
            {"prompt": "P", "chosen": [SYSTEM, QUESTION, GOOD], "rejected": [SYSTEM, QUESTION, BAD]},
            "begin with one of the role system",
        ),
        (
            {"chosen": "\n\nHuman: Q\n\nAssistant: good", "rejected": "\n\nHuman: R\n\nAssistant: bad"},
            "differ before the last turn",
        ),
    ],
)
def test_records_that_are_no_pairs(record: object, message: str) -> None:
    with pytest.raises(BadRecord, match=message):
        parse(record)


def test_other_names_of_the_fields() -> None:
    record = {"question": "Q", "better": "good", "worse": "bad", "chosen": 3}
    names = {"prompt_field": "question", "chosen_field": "better", "rejected_field": "worse"}
    assert parse(record, **names) == parse({"prompt": "Q", "chosen": "good", "rejected": "bad"})


@pytest.fixture
def pairs(make_config: Any, tmp_path: Path) -> ShardSet:
    """Thirty pairs, one of weight 0, one whose answers are the same, and one that no row can hold."""
    lines = [{"prompt": f"Q {number}", "chosen": f"yes {number}", "rejected": "no"} for number in range(30)]
    lines += [{"prompt": "Q", "chosen": "x", "rejected": "z", "weight": 0}]
    lines += [{"prompt": "Q", "chosen": "x", "rejected": "x"}, {"prompt": "Q", "chosen": "x " * 400, "rejected": "y"}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = {"kind": "preferences", "paths": [str(tmp_path / "pairs.jsonl")], "template": "chatml"}
    config = make_config(source, row_length=128, dedup={"near_duplicates": False})
    return prepare(config, say=lambda line: None)


def test_pairs_that_cannot_be_trained_on_are_dropped_and_counted(pairs: ShardSet) -> None:
    assert pairs.report["filtered"] == {"equal_answers": 1, "longer_than_row": 1, "no_trained_turn": 1}
    assert pairs.train.documents + pairs.valid.documents == 60
    report = json.loads((pairs.path / "report" / "report.json").read_text())
    assert sum(rule["documents"] for rule in report["rules"]) == 3
    assert all(rule["description"] != "No rule of this name is configured." for rule in report["rules"])


def assert_pieces_are_whole_documents(split: Split) -> None:
    pieces = [piece for row in range(split.rows) for piece in split.pieces(row)]
    assert sorted(piece.document for piece in pieces) == list(range(split.documents))
    for chosen, rejected in zip(pieces[::2], pieces[1::2], strict=True):
        assert (chosen.document % 2, rejected.document) == (0, chosen.document + 1)
        assert "yes" in chosen.text
        assert "no" in rejected.text
        assert [(piece.offset, piece.tokens) for piece in (chosen, rejected)] == [
            (0, piece.document_tokens) for piece in (chosen, rejected)
        ]


def test_both_answers_of_a_pair_are_shown_as_documents(pairs: ShardSet) -> None:
    assert_pieces_are_whole_documents(pairs.train)
    rows = pairs.train.rows
    lines = list(inspect(pairs.path, split="train", row=None, rows=rows, domain=None, coloured=False))
    for what in ("begins", "ends"):
        assert sum(line.startswith("===") and f" {what}" in line for line in lines) == pairs.train.documents


def answers(split: Split) -> list[str]:
    return [text.decode() for _, text in split.trained_text()]


def test_held_out_figures_are_of_what_is_trained_on(pairs: ShardSet) -> None:
    split = pairs.valid
    found = answers(split)
    assert len(found) == split.documents
    assert set(found[1::2]) == {"no"}
    assert all(text.startswith("yes ") for text in found[::2])
    loader = EvalLoader(split, 128, 2)
    assert loader.text_bytes == sum(map(len, found))
    tokens = sum(len(ids) for ids, _ in split.trained_text())
    assert sum(float(batch.weights_BT.sum()) for batch in loader) == tokens
    assert sum(batch.token_count for batch in loader) == tokens
    counts = np.bincount(np.concatenate([ids for ids, _ in split.trained_text()]))
    shares = counts[counts > 0] / tokens
    entropy = -(shares * np.log2(shares)).sum() * tokens / loader.text_bytes
    assert baselines(split).unigram_bits_per_byte == pytest.approx(entropy)


def test_held_out_bytes_are_those_of_the_original_answers(make_config: Any, tmp_path: Path) -> None:
    """With a tokenizer that replaces characters, and that begins every document with a token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    names = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=names)
    tokenizer.train_from_iterator(["user assistant yes no Q 0123456789\n"] * 4, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    lines = [{"prompt": f"Q {number}", "chosen": f"yes 東京 {number}", "rejected": "no Ø"} for number in range(30)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = {"kind": "preferences", "paths": [str(tmp_path / "pairs.jsonl")], "template": "chatml"}
    options = {"path": str(tmp_path / "tokenizer.json"), "end_of_text": "</s>", "begin_of_text": "<s>"}
    section = {**options, "lossless": False}
    config = make_config(source, row_length=128, dedup={"near_duplicates": False}, tokenizer=section)
    split = prepare(config, say=lambda line: None).valid
    assert_pieces_are_whole_documents(split)
    found = answers(split)
    assert len(found) == split.documents
    assert set(found[1::2]) == {"no Ø"}
    assert all(text.startswith("yes 東京 ") for text in found[::2])
    loader = EvalLoader(split, 128, 2)
    assert loader.text_bytes == sum(len(text.encode()) for text in found)
    assert sum(batch.token_count for batch in loader) == sum(len(ids) for ids, _ in split.trained_text())
    assert baselines(split).unigram_bits_per_byte > 0


def conversations(section: Any) -> list[Conversation | Pair]:
    bad = BadRecords(0, lambda line: None)
    return [from_json(document.text) for document in make_source(section).documents(bad)]


def test_generated_tasks_as_conversations() -> None:
    section = ChatTasksSource(kind="chat_tasks", tasks=["parity", "arithmetic"], documents=6, characters=60, system="S")
    made = conversations(section)
    assert len(made) == 6
    for conversation in made:
        assert isinstance(conversation, Conversation)
        assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
    last = made[-1]
    assert isinstance(last, Conversation)
    assert last.messages[-1]["content"].startswith("<think>")


def test_generated_tasks_as_pairs() -> None:
    options = {"tasks": ["parity", "copying"], "documents": 40, "characters": 60, "seed": 3}
    made = conversations(TaskPreferencesSource(kind="task_preferences", **options))
    right = {
        conversation.messages[0]["content"]: conversation.messages[1]["content"]
        for conversation in conversations(ChatTasksSource(kind="chat_tasks", **options))
        if isinstance(conversation, Conversation)
    }
    assert len(made) > 30
    for pair in made:
        assert isinstance(pair, Pair)
        prompt, answer = (message["content"] for message in pair.chosen.messages)
        assert right[prompt] == answer != pair.rejected.messages[1]["content"]
        assert pair.rejected.messages[0]["content"] == prompt
