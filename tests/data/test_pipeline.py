"""The stages of a preparation: what is filtered, what stays, and that neither order nor processes decide anything."""

from __future__ import annotations

import importlib
import json
import os
import random
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdrmix import _text
from cdrmix.config.schema_data import Dedup
from cdrmix.data.pipeline.duplicates import deduplicate
from cdrmix.data.pipeline.near_duplicates import CROWDED_BUCKET
from cdrmix.data.pipeline.reading import quality_of
from cdrmix.data.prepare import prepare
from cdrmix.data.shards import ShardSet
from cdrmix.data.sources import streams
from cdrmix.data.sources.base import Document
from cdrmix.errors import CorpusError, VocabularyError

WORDS = [f"{first}{second}" for first in ("ba", "du", "ki", "lo", "me", "sa", "ti", "vo") for second in "abcdefghijkl"]


def quiet(line: str) -> None:
    pass


def sentence(random_words: random.Random, length: int) -> str:
    return " ".join(random_words.choices(WORDS, k=length))


def write(path: Path, records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A JSON-lines file and the `data.source` section that names it."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"kind": "jsonl", "paths": [str(path)]}


def decoded(shards: ShardSet) -> list[str]:
    return [text.decode() for split in (shards.train, shards.valid) for text in split.text()]


def planted(count: int = 60) -> tuple[list[str], list[set[int]]]:
    """Texts, and which of them are one another's near-duplicates: three versions of every third, a word apart."""
    draw = random.Random(1)
    texts: list[str] = []
    families: list[set[int]] = []
    for number in range(count):
        words = sentence(draw, 150).split()
        members = [len(texts)]
        texts.append(" ".join(words))
        for _ in range(2 if number % 3 == 0 else 0):
            changed = list(words)
            changed[draw.randrange(150)] = f"new{draw.randrange(10**6)}"
            members.append(len(texts))
            texts.append(" ".join(changed))
        families.append(set(members))
    return texts, families


def test_one_of_every_family_stays(make_config: Any, tmp_path: Path) -> None:
    texts, families = planted()
    shards = prepare(make_config(write(tmp_path / "a.jsonl", ({"text": text} for text in texts))), say=quiet)
    left = {texts.index(text) for text in decoded(shards)}
    assert [len(left & family) for family in families] == [1] * len(families)
    assert shards.report["filtered"] == {"near_duplicate": len(texts) - len(families)}
    report = json.loads((shards.path / "report" / "report.json").read_text())
    assert report["near_duplicates"]["cluster_sizes"] == {"3": 20}
    assert report["near_duplicates"]["verified_pairs"] == 60


def test_the_best_of_a_family_stays(make_config: Any, tmp_path: Path) -> None:
    """Quality decides before priority, priority before the hash of the content; for exact and for near-duplicates."""
    texts, families = planted(12)
    best = [max(family) for family in families if len(family) > 1]
    records = [{"text": text, "score": 0.5 + (number in best)} for number, text in enumerate(texts)]
    source = write(tmp_path / "a.jsonl", [*records, {"text": f"{texts[best[0]]}\n", "score": 9.5}])
    other = write(tmp_path / "b.jsonl", [{"text": f"{texts[best[1]]} end", "score": 1.5}])
    domains = {
        "one": {"source": source, "quality_field": "score"},
        "two": {"source": other, "quality_field": "score", "priority": 1},
    }
    left = decoded(prepare(make_config(None, domains=domains), say=quiet))
    assert f"{texts[best[0]]}\n" in left
    assert texts[best[0]] not in left
    assert f"{texts[best[1]]} end" in left
    assert texts[best[1]] not in left
    assert all(texts[number] in left for number in best[2:])
    assert len(left) == len(families)


def test_empty_and_wordless_documents_do_not_collapse(make_config: Any, tmp_path: Path) -> None:
    """Documents without text are filtered as such; those without words have no shingles and are nobody's duplicates."""
    texts = ["", " \n", "\0", "!!!", "???", "...", "one", "two words"]
    shards = prepare(make_config(write(tmp_path / "a.jsonl", ({"text": text} for text in texts))), say=quiet)
    assert sorted(decoded(shards)) == sorted(texts[3:])
    assert shards.report["filtered"] == {"empty": 3}


def test_addresses_and_hosts(make_config: Any, tmp_path: Path) -> None:
    draw = random.Random(2)
    addresses = [
        "http://www.example.org/a?utm_source=x",
        "https://example.org/a",
        *(f"https://sub{number}.example.org/{number}" for number in range(5)),
        *(f"https://site{number}.co.uk/" for number in range(3)),
        *(f"https://forum.example.net/#!topic/{number}" for number in range(2)),
        None,
        None,
    ]
    records = [{"text": sentence(draw, 40), "url": url} for url in addresses]
    dedup = {"url": True, "documents_per_host": 3}
    shards = prepare(make_config(write(tmp_path / "a.jsonl", records), dedup=dedup), say=quiet)
    left = decoded(shards)
    urls = [record["url"] for record in records if record["text"] in left]
    assert shards.report["filtered"] == {"duplicate_url": 1, "documents_per_host": 3}
    assert sum("example.org" in str(url) for url in urls) == 3
    assert sum("co.uk" in str(url) for url in urls) == 3
    assert sum("#!topic" in str(url) for url in urls) == 2
    assert urls.count(None) == 2


def fingerprints(make_config: Any, tmp_path: Path, source: dict[str, Any], name: str, **data: Any) -> str:
    return prepare(make_config(source, cache=str(tmp_path / name), **data), say=quiet).fingerprint


def test_nothing_but_the_text_decides(make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Order of records and files, number of processes and size of tasks: the same bytes."""
    texts, _ = planted()
    texts += texts[:7]
    data = {"dedup": {"documents_per_host": 20}}
    records = [{"text": text, "url": f"http://h{number % 3}.org/{number}"} for number, text in enumerate(texts)]
    expected = fingerprints(make_config, tmp_path, write(tmp_path / "a.jsonl", records), "a", workers=1, **data)
    random.Random(3).shuffle(records)
    folder = tmp_path / "parts"
    folder.mkdir()
    for number in range(4):
        write(folder / f"{number}.jsonl", records[number::4])
    source = {"kind": "jsonl", "paths": [str(folder)]}
    monkeypatch.setattr("cdrmix.data.prepare.MEMORY_PER_TEXT_BYTE", 30)  # some 35 kB a task: many units and partitions
    assert fingerprints(make_config, tmp_path, source, "b", workers=2, memory_mb=1, **data) == expected
    assert fingerprints(make_config, tmp_path, source, "c", workers=1, memory_mb=1, **data) == expected


def test_where_every_document_came_from(make_config: Any, tmp_path: Path) -> None:
    texts, families = planted(9)
    source = write(tmp_path / "a.jsonl", ({"text": text, "licence": "CC0"} for text in texts))
    shards = prepare(make_config(source), say=quiet)
    rows = pyarrow.parquet.read_table(shards.path / "report" / "documents.parquet").to_pylist()
    assert len(rows) == len(families)
    for split in (shards.train, shards.valid):
        mine = [row for row in rows if row["split"] == split.name]
        lines = [int(row["where"].rpartition(":")[2]) for row in mine]
        assert [texts[line - 1].encode() for line in lines] == list(split.text())
        assert sum(row["tokens"] for row in mine) == split.tokens - 1
    assert {row["meta"] for row in rows} == {'{"licence": "CC0"}'}


def test_nothing_left(make_config: Any, tmp_path: Path) -> None:
    draw = random.Random(4)
    source = write(tmp_path / "a.jsonl", ({"text": sentence(draw, 20)} for _ in range(5)))
    with pytest.raises(
        CorpusError, match=r"0 documents are left of 5 read, after 5 by \w+ were filtered.*data\.filters"
    ):
        prepare(make_config(source, filters={"rules": ["length"], "bounds": {"length": 1e6}}), say=quiet)


def test_pairs_beyond_one_band_join_families(make_config: Any, tmp_path: Path) -> None:
    """A chain of texts, each near the next: one cluster, though its ends are unlike."""
    draw = random.Random(5)
    words = sentence(draw, 200).split()
    chain = []
    for number in range(8):
        words = list(words)
        words[10 * number : 10 * number + 5] = sentence(draw, 5).split()
        chain.append(" ".join(words))
    shingles = [{tuple(text.split()[i : i + 5]) for i in range(196)} for text in chain]
    similar = {
        (a, b): len(shingles[a] & shingles[b]) / len(shingles[a] | shingles[b]) for a, b in combinations(range(8), 2)
    }
    assert similar[0, 1] > 0.8 > similar[0, 7]
    texts = [*chain, *(sentence(draw, 100) for _ in range(3))]
    source = write(tmp_path / "a.jsonl", ({"text": text} for text in texts))
    assert len(decoded(prepare(make_config(source, dedup={"bands": 64, "rows": 2}), say=quiet))) == 4


def test_personal_data_is_replaced_and_counted(make_config: Any, tmp_path: Path) -> None:
    texts = ["write to jane.doe@example.org or joe@example.com now", "call nobody", "jane.doe@example.org again"]
    source = write(tmp_path / "a.jsonl", ({"text": text} for text in texts))
    shards = prepare(make_config(source, pii={"kinds": ["email"]}), say=quiet)
    left = "\n".join(decoded(shards))
    assert "@" not in left
    assert left.count("<EMAIL>") == 3
    assert json.loads((shards.path / "report" / "report.json").read_text())["pii"] == {"email": 3}


def test_held_out_text_has_no_objectives(make_config: Any, tmp_path: Path) -> None:
    draw = random.Random(6)
    texts = [f"{sentence(draw, 20)} <think> {sentence(draw, 5)} </think>" for _ in range(40)]
    source = write(tmp_path / "a.jsonl", ({"text": text} for text in texts))
    objectives = {"fim": {"rate": 1.0}, "spans": [{"begin": "<think>", "end": "</think>", "weight": 0.5}]}
    shards = prepare(make_config(source, objectives=objectives), say=quiet)
    held_out = {text.decode() for text in shards.valid.text()}
    assert held_out <= set(texts)
    assert not {text.decode() for text in shards.train.text()} & set(texts)
    assert shards.train.weighted
    assert not shards.valid.weighted


@given(st.text(st.sampled_from(" \n\t\r\u00a0\u2003\u3000\x85\x1c\u200babé東🙂"), max_size=30))
def test_white_space_is_squeezed_as_python_does(text: str) -> None:
    assert _text.squeezed(text) == " ".join(text.split()).encode()


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_stream_goes_on_where_it_stood(
    suffix: str, make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Hugging Face dataset of two files, read by datasets or by us: what was read before a failure is not read
    again, and nothing is lost."""
    import datasets

    draw = random.Random(7)
    texts = [sentence(draw, 60) for _ in range(200)]
    folder = tmp_path / "dataset"
    folder.mkdir()
    for number in range(2):
        part = texts[100 * number : 100 * number + 100]
        if suffix == "txt":
            (folder / f"{number}.txt").write_text("".join(f"{text}\n" for text in part))
        else:
            write(folder / f"{number}.jsonl", ({"text": text} for text in part))
    source = {"kind": "huggingface", "name": str(folder)}
    monkeypatch.setattr("cdrmix.data.prepare.MEMORY_PER_TEXT_BYTE", 100)  # some 10 kB, 25 records, a unit
    config = make_config(source, workers=1, memory_mb=1)
    given: list[Any] = []
    broken_off = 180

    def counted(rows: Iterable[Any]) -> Any:
        for row in rows:
            if len(given) == broken_off:
                raise ConnectionError("reset by peer")
            given.append(row)
            yield row

    iterate, read = datasets.IterableDataset.__iter__, streams.json_lines
    monkeypatch.setattr(datasets.IterableDataset, "__iter__", lambda stream: counted(iterate(stream)))
    monkeypatch.setattr(streams, "json_lines", lambda path, limit: counted(read(path, limit)))
    with pytest.raises(CorpusError, match="reset by peer"):
        prepare(config, say=quiet)
    assert len(given) == 180
    given.clear()
    broken_off = -1
    shards = prepare(config, say=quiet)
    assert sorted(decoded(shards)) == sorted(texts)
    assert len(given) <= 100  # lines of a file that was begun are read over
    last = given[-1]["text"] if suffix == "txt" else json.loads(given[-1].raw)["text"]
    assert last == texts[-1]


def test_a_tokenizer_without_the_marks_is_refused_before_the_text_is_read(make_config: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", ({"text": f"{number} text"} for number in range(9)))
    path = prepare(make_config(source), say=quiet).tokenizer_path
    said: list[str] = []
    with pytest.raises(VocabularyError, match=r"no special token '<\|fim_prefix\|>'"):
        prepare(make_config(source, tokenizer={"path": str(path)}, objectives={"fim": {}}), say=said.append)
    assert said == []


def test_metadata_of_strangers(make_config: Any, tmp_path: Path) -> None:
    """Numbers beyond a float, fields too long to keep, nested ones, a file name that is not UTF-8."""
    records = [{"text": f"text {number}", "score": 10**400 * (number - 1), "raw": "x" * 5000} for number in range(3)]
    records[0]["list"] = [1, {"a": "b"}]
    name = os.fsdecode(b"odd \xff.jsonl")
    write(tmp_path / name, records)
    domains = {"one": {"source": {"kind": "jsonl", "paths": [str(tmp_path)]}, "quality_field": "score"}}
    shards = prepare(make_config(None, domains=domains), say=quiet)
    rows = pyarrow.parquet.read_table(shards.path / "report" / "documents.parquet").to_pylist()
    assert {row["where"] for row in rows} == {f"{tmp_path}/odd \\xff.jsonl:{line}" for line in (1, 2, 3)}
    kept = {json.dumps(json.loads(row["meta"]).get("list")) for row in rows}
    assert kept == {"null", json.dumps('[1, {"a": "b"}]')}
    assert not any("xxx" in row["meta"] for row in rows)


def test_no_personal_data_in_the_report(make_config: Any, tmp_path: Path) -> None:
    texts = [f"mail{number}@example.org {'long ' * number}" for number in range(6)]
    records = ({"text": text, "author": "ann@example.org", "url": f"http://a.org/{text[:5]}"} for text in texts)
    data = {"pii": {"kinds": ["email"]}, "filters": {"rules": ["length"], "bounds": {"length": 30}}}
    shards = prepare(make_config(write(tmp_path / "a.jsonl", records), **data), say=quiet)
    assert 0 < shards.report["filtered"]["length"] < 5
    for file in (shards.path / "report").rglob("*"):
        if file.is_file():
            plain = str(pyarrow.parquet.read_table(file).to_pylist()) if file.suffix == ".parquet" else file.read_text()
            assert "@example.org" not in plain, file
    scored = pyarrow.parquet.read_table(shards.path / "report" / "scores").column("hash").to_pylist()
    kept = pyarrow.parquet.read_table(shards.path / "report" / "documents.parquet").column("hash").to_pylist()
    assert set(kept) < set(scored)


@pytest.mark.parametrize(
    ("value", "quality"), [(0.5, 0.5), ("0.5", 0.5), ("5", 5.0), ("good", 0.0), ("nan", 0.0), (None, 0.0), ([1], 0.0)]
)
def test_a_quality_may_be_a_number_as_a_text(value: Any, quality: float) -> None:
    """CSV has only texts."""
    assert quality_of(value) == quality


MAIL = "jane.roe@example.org"
NESTED: dict[str, Any] = {
    "mapping": {"author": {"mail": MAIL}, "url": f"https://e.com/u?mail={MAIL}"},
    "list": [MAIL, [MAIL]],
    "escaped": ["a\n" + MAIL, f'"{MAIL}"', f"«{MAIL}»"],
    "names": {MAIL: 1},
    f"by {MAIL}": 2,
    "surrogate": "caf\ud83d",
    "surrogates": [{"\ud83d": "caf\ud83d " + MAIL}],
    "url": "https://e.com/\ud83d",
}


@pytest.mark.parametrize("kinds", [[], ["email"]])
def test_every_string_of_the_metadata_is_scrubbed_and_can_be_written(
    kinds: list[str], make_config: Any, tmp_path: Path
) -> None:
    deep: Any = MAIL
    for _ in range(800):
        deep = [deep]
    records: list[dict[str, Any]] = [{"text": f"text {number}"} | NESTED | {"deep": deep} for number in range(4)]
    source = write(tmp_path / "a.jsonl", records)
    shards = prepare(make_config(source, pii={"kinds": kinds}, dedup={"url": False}), say=quiet)
    rows = pyarrow.parquet.read_table(shards.path / "report" / "documents.parquet").to_pylist()
    assert len(rows) == 4
    for row in rows:
        # lists and mappings are JSON in JSON
        found = {
            name: json.loads(value) if str(value)[0] in "[{" else value
            for name, value in json.loads(row["meta"]).items()
        }
        expected = json.dumps(NESTED).replace("\\ud83d", "\\ufffd")
        assert found == json.loads(expected.replace(MAIL, "<EMAIL>") if kinds else expected)


def test_no_part_of_an_address_is_in_an_excerpt_or_a_reason(make_config: Any, tmp_path: Path) -> None:
    """An excerpt ends inside of an address or a key, and a record is bad because of a role that is an address."""
    key = "-----BEGIN PRIVATE KEY-----\n" + "MIIEvQ" * 100 + "\n-----END PRIVATE KEY-----"
    texts = [
        "x" * 380 + f" jane.roe@{'very-' * 9}long-example.org",
        key,
        *(f"text {number} " * 200 for number in range(9)),
    ]
    data = {
        "pii": {"kinds": ["email", "secret"]},
        "filters": {"rules": ["length"], "bounds": {"length": 1000}},
        "workers": 1,
    }
    chats = [{"messages": [{"role": MAIL, "content": "a"}]}]
    domains = {
        "text": {"source": write(tmp_path / "a.jsonl", ({"text": text} for text in texts))},
        "chat": {"source": write(tmp_path / "b.jsonl", chats) | {"kind": "chat", "template": "chatml"}},
    }
    shards = prepare(make_config(None, domains=domains, dedup={"near_duplicates": False}, **data), say=quiet)
    assert shards.report["filtered"] == {"length": 2}
    report = (shards.path / "report" / "report.json").read_text()
    assert "has the role '<EMAIL>'" in report
    for part in ("jane", "MIIEvQ", "roe@"):
        assert part not in report


def test_a_crowd_of_look_alikes_is_one(make_config: Any, tmp_path: Path) -> None:
    """More of them than documents of a bucket that all others are compared with."""
    draw = random.Random(9)
    base = sentence(draw, 120)
    texts = [f"{base} {number}" for number in range(4 * CROWDED_BUCKET)] + [sentence(draw, 50) for _ in range(4)]
    source = write(tmp_path / "a.jsonl", ({"text": text} for text in texts))
    assert len(decoded(prepare(make_config(source, workers=1), say=quiet))) == 5


def test_memory_may_be_lowered_before_going_on(
    make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, _ = planted()
    source = write(tmp_path / "a.jsonl", ({"text": text} for text in texts))
    monkeypatch.setattr("cdrmix.data.prepare.MEMORY_PER_TEXT_BYTE", 30)
    expected = prepare(make_config(source, cache=str(tmp_path / "whole")), say=quiet).fingerprint
    for stage in ("merge", "sign", "match", "verify"):
        module = "duplicates" if stage == "merge" else "near_duplicates"
        calls = []
        with monkeypatch.context() as patch:
            function = getattr(importlib.import_module(f"cdrmix.data.pipeline.{module}"), stage)

            def fail(task: Any, function: Any = function, calls: list[Any] = calls) -> Any:
                calls.append(task)
                if len(calls) == 2:
                    raise CorpusError("out of memory, say")
                return function(task)

            patch.setattr(f"cdrmix.data.pipeline.{module}.{stage}", fail)
            with pytest.raises(CorpusError, match="out of memory"):
                prepare(make_config(source, cache=str(tmp_path / stage), memory_mb=2, workers=1), say=quiet)
        lowered = prepare(make_config(source, cache=str(tmp_path / stage), memory_mb=1, workers=1), say=quiet)
        assert lowered.fingerprint == expected, stage


def test_a_changed_local_dataset_is_prepared_anew(make_config: Any, tmp_path: Path) -> None:
    folder = tmp_path / "dataset"
    folder.mkdir()
    config = make_config({"kind": "huggingface", "name": str(folder)})
    write(folder / "a.jsonl", ({"text": f"first {number}"} for number in range(9)))
    assert "first 3" in decoded(prepare(config, say=quiet))
    write(folder / "a.jsonl", ({"text": f"second one {number}"} for number in range(9)))
    assert "second one 3" in decoded(prepare(config, say=quiet))


def test_deduplication_by_itself(tmp_path: Path) -> None:
    """Documents in, survivors out with their metadata, the same for any order; nothing is left in the folder."""
    texts, families = planted()
    documents = [
        Document(text, f"source {n % 2}", str(n), {"url": f"http://h.org/{n}"}) for n, text in enumerate(texts)
    ]
    left = list(deduplicate(documents, Dedup(), folder=tmp_path))
    assert [len(family & {int(document.id) for document in left}) for family in families] == [1] * len(families)
    assert all(document == documents[int(document.id)] for document in left)
    assert list(deduplicate(reversed(documents), Dedup(), memory_mb=1, folder=tmp_path)) == left
    capped = list(deduplicate(documents, Dedup(near_duplicates=False, documents_per_host=5), folder=tmp_path))
    assert len(capped) == 5
    unknown = list(deduplicate(documents, Dedup(near_duplicates=False, documents_per_host=5), url_field=None))
    assert len(unknown) == len(texts)
    assert list(tmp_path.iterdir()) == []


def test_addresses_within_a_mapping_and_sets_of_one_site(make_config: Any, tmp_path: Path) -> None:
    """Dolma's format has the address in the mapping `metadata`; where cap_hosts is false no site is too large."""
    for name in ("web", "wiki"):
        records = (
            {"text": f"{name}, page {n}, as it was read.", "metadata": {"url": f"https://{name}.org/{n // 2}"}}
            for n in range(12)
        )
        write(tmp_path / name / "a.jsonl", records)

    def domain(name: str, **more: Any) -> dict[str, Any]:
        source = {"kind": "huggingface", "name": str(tmp_path / name)}
        return {"source": source, "url_field": "metadata.url"} | more

    dedup = {"url": True, "documents_per_host": 2, "near_duplicates": False}
    domains = {"web": domain("web"), "wiki": domain("wiki", cap_hosts=False)}
    texts = decoded(prepare(make_config(None, domains=domains, dedup=dedup), say=quiet))
    count = {name: sum(text.startswith(name) for text in texts) for name in domains}
    assert count == {"web": 2, "wiki": 6}
