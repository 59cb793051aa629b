"""Parts of the loss through the preparation: which part a token is in, chains of thought and their share, columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdrmix.config.schema import Config
from cdrmix.config.schema_objectives import Cot, Objectives
from cdrmix.data.chains import ChainCounts, choose_chains
from cdrmix.data.loader import EvalLoader, train_loader
from cdrmix.data.objectives import COT, FIM, NEXT_TOKEN, PARTS, encode_documents
from cdrmix.data.prepare import prepare
from cdrmix.data.shards import ShardSet, Split
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import CorpusError, VocabularyError

MakeConfig = Callable[..., Config]
FIM_MARKS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
OBJECTIVES: dict[str, Any] = {
    "weights": {},
    "fim": {"rate": 0.5},
    "cot": {"max_share": 1.0},
}


def chain(number: int) -> str:
    return f"Question {number}\n<think>{number} and {number} is {2 * number}.</think> \nAnswer: {2 * number}\n"


@pytest.fixture
def corpus(tmp_path: Path) -> dict[str, Any]:
    """Forty texts without and forty with a chain of thought."""
    plain = [f"def function_{number}(x):\n    return x + {number}\n" * (1 + number % 4) for number in range(40)]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*plain, *map(chain, range(40))]))
    return {"kind": "jsonl", "paths": [str(path)]}


def settings(**objectives: Any) -> dict[str, Any]:
    return {
        "vocab_size": 330,
        "workers": 1,
        "dedup": {"near_duplicates": False},
        "objectives": {**OBJECTIVES, **objectives},
    }


def documents(split: Split) -> list[tuple[list[int], list[int], list[float]]]:
    """Ids, parts and weights of each document as a loader gives them, put together from its rows."""
    found: dict[int, dict[int, tuple[int, int, float]]] = {}
    for row in range(split.rows):
        for piece in split.pieces(row):
            start, length = np.array([piece.start]), np.array([piece.tokens])
            ids = split.read(piece.start + 1, piece.start + 1 + piece.tokens)
            parts, weights = np.zeros(piece.tokens, np.uint8), np.ones(piece.tokens, np.float32)
            if split.parted:
                split.copy_parts(start, length, np.array([0]), parts)
            if split.weighted:
                split.copy_weights(start, length, np.array([0]), weights)
            tokens = zip(ids.tolist(), parts.tolist(), weights.tolist(), strict=True)
            found.setdefault(piece.document, {}).update(enumerate(tokens, piece.offset))
    ordered = [[tokens[at] for at in sorted(tokens)] for _, tokens in sorted(found.items())]
    return [tuple(map(list, zip(*tokens, strict=True))) for tokens in ordered]  # type: ignore[misc]


def test_every_token_is_in_the_part_of_its_text(make_config: MakeConfig, corpus: dict[str, Any]) -> None:
    shards = prepare(make_config(corpus, **settings()), say=lambda _: None)
    tokenizer = shards.tokenizer
    marks = {tokenizer.special_id(mark) for mark in FIM_MARKS}
    kinds = {"fim": 0, "cot": 0, "plain": 0}
    for ids, parts, weights in documents(shards.train):
        assert set(weights) == {1.0}
        if marks & set(ids):
            assert set(parts) == {FIM}
            kinds["fim"] += 1
            continue
        text = tokenizer.decode(ids[:-1])
        of_chain = tokenizer.decode([token for token, part in zip(ids, parts, strict=True) if part == COT])
        expected = text[text.index("<think>") : text.index("Answer")] if "<think>" in text else ""
        assert of_chain == expected  # with the white space behind the end mark
        assert parts[-1] == NEXT_TOKEN
        kinds["cot" if expected else "plain"] += 1
    assert min(kinds.values()) > 5
    rows = np.arange(shards.train.rows)
    counted = shards.train.parts_in_rows(rows)
    every = [part for _, parts, _ in documents(shards.train) for part in parts]
    assert counted == {name: every.count(number) for number, name in enumerate(PARTS)}
    assert sum(counted.values()) == shards.train.targets_in_rows(rows)


def test_held_out_text_is_as_it_is_and_rearranged_in_a_split_of_its_own(
    make_config: MakeConfig, corpus: dict[str, Any]
) -> None:
    plain = prepare(make_config(corpus, vocab_size=330, dedup={"near_duplicates": False}), say=lambda _: None)
    shards = prepare(make_config(corpus, **settings(fim={"rate": 0.5, "loss": "middle"})), say=lambda _: None)
    assert [*plain.valid.text()] == [*shards.valid.text()]
    assert shards.valid.text_bytes == plain.valid.text_bytes
    assert EvalLoader(shards.valid, 16, 4).text_bytes == plain.valid.text_bytes
    assert plain.rearranged is None
    assert shards.rearranged is not None
    tokenizer = shards.tokenizer
    prefix, middle, suffix = (tokenizer.special_id(mark) for mark in FIM_MARKS)
    texts = {text.decode() for text in shards.valid.text() if b"<think>" not in text}
    found = set()
    for ids, parts, weights in documents(shards.rearranged):
        assert set(parts) == {FIM}
        at = ids.index(middle)
        assert set(weights[: at + 1]) == {0.0}
        assert weights[-1] == 1.0
        of_suffix = tokenizer.decode(ids[ids.index(suffix) + 1 : at])
        rest = tokenizer.decode(ids[at + 1 : -1])
        found.add(tokenizer.decode(ids[1 : ids.index(suffix)]) + rest + of_suffix)
        trained = [token for token, weight in zip(ids[at + 1 : -1], weights[at + 1 : -1], strict=True) if weight]
        assert rest.endswith(tokenizer.decode(trained))
        assert ids[0] == prefix
    assert found == texts
    assert shards.report["documents"] == plain.report["documents"], "the report counts the text once"


def test_chains_of_thought_take_at_most_their_share(make_config: MakeConfig, corpus: dict[str, Any]) -> None:
    share = 0.1
    said: list[str] = []
    shards = prepare(make_config(corpus, **settings(cot={"max_share": share}, fim=None)), say=said.append)
    counted = shards.train.parts_in_rows(np.arange(shards.train.rows))
    found = counted["cot"] / sum(counted.values())
    texts = [shards.tokenizer.decode(ids[:-1]) for ids, _, _ in documents(shards.train)]
    kept = [text for text in texts if "<think>" in text]
    longest = max(len(shards.tokenizer.encode(text)) for text in kept)
    assert share - longest / sum(counted.values()) < found <= share, "one more chain would be too many"
    # the others have their question and answer, and nothing else
    numbers = {text.split()[1] for text in texts if text.startswith("Question")}
    without = {text for text in texts if text.startswith("Question") and "<think>" not in text}
    assert without == {f"Question {n}\nAnswer: {2 * int(n)}\n" for n in numbers - {text.split()[1] for text in kept}}
    assert len(kept) == shards.report["chains"]["kept_documents"] > 0
    assert len(numbers) == shards.report["chains"]["documents"]
    assert shards.report["chains"]["kept_tokens"] == counted["cot"]
    assert any(f"{len(kept)} of {len(numbers)} training documents keep theirs" in line for line in said)
    assert all("<think>" in text.decode() for text in shards.valid.text() if b"Question" in text)


def test_the_share_of_documents(make_config: MakeConfig, corpus: dict[str, Any]) -> None:
    """A rate of 0.5 of about 30 documents: between 5 and 25 but for one of 10^4 seeds."""
    one, other = (
        prepare(make_config(corpus, **settings(cot={"max_share": 1.0, "rate": rate})), say=lambda _: None)
        for rate in (0.5, 1.0)
    )
    assert 5 <= one.report["chains"]["kept_documents"] <= 25
    assert other.report["chains"]["kept_documents"] == other.report["chains"]["documents"]
    assert one.train.text_bytes == sum(len(text) for text in one.train.text() if b"fim" not in text)


@given(
    st.lists(st.tuples(st.floats(0, 0.999), st.integers(1, 50)), max_size=30),
    st.integers(0, 500),
    st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0]),
    st.sampled_from([0.3, 1.0]),
)
def test_a_choice_is_the_largest_one(pairs: list[tuple[float, int]], others: int, share: float, rate: float) -> None:
    counts = ChainCounts(np.array([n for n, _ in pairs], float), np.array([t for _, t in pairs], np.int64), others)
    choice = choose_chains([counts], Cot(max_share=share, rate=rate))
    kept = [tokens for number, tokens in pairs if number < choice.below]
    assert (choice.kept_documents, choice.kept_tokens) == (len(kept), sum(kept))
    assert choice.share <= share or not kept
    assert all(number < rate for number, _ in pairs if number < choice.below)
    left = sorted(number for number, _ in pairs if number >= choice.below)
    if left and left[0] < rate:
        more = sum(tokens for number, tokens in pairs if number <= left[0])
        # 1e-9: a share that is met exactly may be rounded to above it
        assert more > share * (more + others) - 1e-9


def test_chains_from_columns(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "chains.jsonl"
    records = [{"q": f"What is {n} + 1?", "steps": f"{n} + 1 = {n + 1}." * (n % 2), "a": str(n + 1)} for n in range(20)]
    records += [{"q": "a", "steps": "</think>", "a": "b"}, {"q": "a", "steps": "b"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    columns = {"text": {"question": "q", "thought": "steps", "answer": "a"}}
    said: list[str] = []
    config = make_config(
        {"kind": "jsonl", "paths": [str(path)]},
        **settings(cot={"columns": columns, "max_share": 1.0}, fim=None),
    )
    shards = prepare(config, say=said.append)
    texts = [text.decode() for split in (shards.train, shards.valid) for text in split.text()]
    expected = [
        f"What is {n} + 1?\n" + (f"<think>{n} + 1 = {n + 1}.</think>\n" if n % 2 else "") + str(n + 1)
        for n in range(20)
    ]
    assert sorted(texts) == sorted(expected)
    assert shards.report["bad_records"] == 2
    assert any("field 'steps' has a mark of data.objectives.cot" in line for line in said)
    assert any("has no field 'a'" in line for line in said)
    counted = shards.train.parts_in_rows(np.arange(shards.train.rows))
    assert counted["cot"] > 0


def test_weights_change_no_shards_and_parts_do(make_config: MakeConfig, corpus: dict[str, Any]) -> None:
    def prepared(**objectives: Any) -> ShardSet:
        return prepare(make_config(corpus, vocab_size=330, objectives=objectives), say=lambda _: None)

    fim = {"rate": 0.5}
    one = prepared(fim=fim, weights={"fim": 0.3})
    other = prepared(fim=fim, weights={"fim": 1.0}, normalise="sum_of_means")
    plain = prepared(fim=fim)
    assert one.path == other.path != plain.path
    assert not plain.train.parted
    assert plain.train.parts_in_rows(np.arange(plain.train.rows))["next_token"] == plain.train.targets_in_rows(
        np.arange(plain.train.rows)
    )
    files = {name for name in (path.name for path in plain.path.iterdir()) if "weights" in name or "parts" in name}
    assert files == set()


@pytest.mark.parametrize("normalise", ["mean_of_tokens", "sum_of_means"])
def test_the_weights_of_a_batch_are_those_of_its_parts(
    make_config: MakeConfig, corpus: dict[str, Any], normalise: str
) -> None:
    weights = {"next_token": 2.0, "fim": 0.3, "cot": 0.2}
    config = make_config(corpus, **settings(weights=weights, normalise=normalise))
    config = config.model_copy(update={"train": config.train.model_copy(update={"batch_rows": 12})})
    shards = prepare(config, say=lambda _: None)
    for step in range(3):
        for size in (1, 2, 4):
            loaders = [train_loader(config, shards.train, rank, size) for rank in range(size)]
            batches = [batch for loader in loaders for batch in loader.micro_batches(step)]
            assert len({batch.parts for batch in batches}) == len({batch.token_count for batch in batches}) == 1
            totals = dict.fromkeys(PARTS, 0)
            sums = dict.fromkeys(PARTS, 0.0)
            for batch in batches:
                assert batch.parts_BT is not None
                for number, name in enumerate(PARTS):
                    chosen = (batch.parts_BT == number) & (batch.weights_BT > 0)
                    totals[name] += int(chosen.sum())
                    sums[name] += float(batch.weights_BT[chosen].double().sum())
            parts = batches[0].parts
            assert {part.name: part.tokens for part in parts} == {name: n for name, n in totals.items() if n}
            denominator = sum(weights[name] * totals[name] for name in PARTS)
            for name, total in totals.items():
                wanted = weights[name] * (total / denominator if normalise == "mean_of_tokens" else 1.0)
                # weights are float32, and exact but for one rounding
                assert not total or sums[name] / batches[0].token_count == pytest.approx(wanted, rel=2**-23)


def test_rows_in_their_order(make_config: MakeConfig, corpus: dict[str, Any]) -> None:
    config = make_config(corpus, order="sequential")
    shards = prepare(config, say=lambda _: None)
    assert shards.path == prepare(make_config(corpus), say=lambda _: None).path
    loader = train_loader(config, shards.train)
    rows = [int(row) for step in range(shards.train.rows + 3) for row in loader.rows(step)]
    assert rows == [*range(shards.train.rows), 0, 1, 2]
    shuffled = train_loader(make_config(corpus), shards.train)
    assert [int(row) for step in range(shards.train.rows) for row in shuffled.rows(step)] != rows[:-3]


LINES = st.lists(st.sampled_from(["a b\n", "longer line of text\n", "é", "\n"]), max_size=30).map("".join)


@given(LINES, st.integers(1, 40), st.sampled_from([0.0, 0.4, 1.0]), st.integers(0, 2**40))
def test_long_documents_are_cut_and_no_character_is_lost(text: str, most: int, rate: float, seed: int) -> None:
    section = Objectives.model_validate({"fim": {"rate": rate, "characters": most, "seed": seed}, "weights": {}})
    (document,) = encode_documents([text], [bytes(16)], ["text"], TOKENIZER, section)
    borders = [0, *document.cuts, len(document.ids)]
    texts, rearranged = [], 0
    for start, stop in pairwise(borders):
        ids = document.ids[start:stop].tolist()
        if stop < len(document.ids):
            assert ids.pop() == TOKENIZER.end_of_text_id
        if PREFIX not in ids:
            texts.append(TOKENIZER.decode(ids))
            continue
        rearranged += 1
        at, middle = ids.index(SUFFIX), ids.index(MIDDLE)
        decoded = [TOKENIZER.decode(part) for part in (ids[1:at], ids[middle + 1 :], ids[at + 1 : middle])]
        texts.append("".join(decoded))
        assert len(texts[-1]) <= most
        assert set(document.parts[start : stop - 1].tolist()) == {FIM}  # type: ignore[index]
    assert "".join(texts) == text
    if rate == 1.0:
        assert rearranged == len(texts)
    if rate == 0.0:
        assert document.cuts == ()


TOKENIZER = TextTokenizer.train(
    ["a b\nlonger line of text\n"], vocab_size=290, end_of_text="<|endoftext|>", special_tokens=FIM_MARKS
)
PREFIX, MIDDLE, SUFFIX = (TOKENIZER.special_id(mark) for mark in FIM_MARKS)


def test_cut_documents_are_documents_of_the_shards(make_config: MakeConfig, corpus: dict[str, Any]) -> None:
    fim = {"rate": 0.5, "characters": 40}
    for objectives in ({"fim": fim}, {"fim": fim, "weights": {}}):
        config = make_config(corpus, vocab_size=330, dedup={"near_duplicates": False}, objectives=objectives)
        shards = prepare(config, say=lambda _: None)
        end = shards.tokenizer.end_of_text_id
        found = documents(shards.train)
        assert all(ids[-1] == end and end not in ids[:-1] for ids, _, _ in found)
        assert len(found) == shards.train.documents > 80
        assert shards.train.parted == ("weights" in objectives)
    assert shards.rearranged is not None
    assert shards.rearranged.documents > shards.valid.documents


def test_a_missing_column_is_an_error(make_config: MakeConfig, corpus: dict[str, Any]) -> None:
    with pytest.raises(CorpusError):
        prepare(make_config(corpus, **settings(cot={"columns": {"text": {}}}), max_bad_records=0), say=lambda _: None)


def test_batches_of_rows_without_parts_have_one_set() -> None:
    from cdrmix.data.batch import Batch

    ones = torch.ones(2, 3)
    batch = Batch(ones.long(), ones.long(), ones, torch.tensor([0, 6]), 0, 6.0)
    assert batch.part_weights([0, 1]).tolist() == [ones.tolist(), torch.zeros(2, 3).tolist()]


def test_a_tokenizer_file_without_the_marks(make_config: MakeConfig, corpus: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(TextTokenizer.train(["a b c\n"], vocab_size=300, end_of_text="<|endoftext|>").json_bytes)
    objectives = {"fim": {"rate": 1.0}}
    tokenizer = {"path": str(path), "add_tokens": [*FIM_MARKS]}
    shards = prepare(
        make_config(corpus, vocab_size=320, workers=1, tokenizer=tokenizer, objectives=objectives), say=lambda _: None
    )
    assert all(shards.tokenizer.special_id(mark) in documents(shards.train)[0][0] for mark in FIM_MARKS)
    with pytest.raises(VocabularyError, match=r"set model\.vocab_size=26\d or higher, such as 320, a multiple of 64"):
        prepare(make_config(corpus, vocab_size=257, tokenizer=tokenizer, objectives=objectives), say=lambda _: None)


def test_a_trained_tokenizer_with_another_normal_form(make_config: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    texts = [f"ﬁle {n}\n<think>½ of {n}</think>\n{n} ﬁles\n" for n in range(30)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = {"normalization": "nfkc", "lossless": False, "min_frequency": 2, "max_token_length": 8}
    more = settings(cot={"max_share": 1.0})
    shards = prepare(
        make_config({"kind": "jsonl", "paths": [str(path)]}, tokenizer=options, **more), say=lambda _: None
    )
    assert {text.decode() for text in shards.valid.text()} <= {*texts}, "the held-out text is stored as it was"
    assert EvalLoader(shards.valid, 16, 4).text_bytes == shards.valid.text_bytes
    assert shards.valid.parts_in_rows(np.arange(shards.valid.rows))["cot"] > 0
