"""The same rows in every container, JSON lines, compressed, Parquet, CSV and streamed, give the same documents."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import gzip
import hashlib
import io
import json
import os
import pickle
import random
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from containers import CONTAINERS, Row, lines, parquet
from pydantic import TypeAdapter

from cdrmix.config import schema_data as schema
from cdrmix.data.sources import files, make_source, parquet_files
from cdrmix.data.sources.base import BadRecords
from cdrmix.data.sources.conversations import from_json
from cdrmix.errors import CorpusError

ADAPTER: TypeAdapter[schema.Source] = TypeAdapter(schema.Source)
TURNS = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]


FILES: dict[str, Callable[[list[Row]], bytes]] = {
    **{f"rows.{name}": write for name, write in CONTAINERS.items()},
    "plain.parquet": lambda rows: parquet(rows, use_dictionary=False, row_group_size=2),
}


def read(folder: Path, name: str, rows: list[Row], kind: str) -> tuple[list[Any], list[str]]:
    """Text and metadata of the documents of rows in a container, and the reasons of bad records.

    A conversation is compared as values, because the order of the fields is lost in a struct.
    """
    path = folder / name
    path.write_bytes(FILES[name](rows))
    section = {"kind": kind, "paths": [str(path)]}
    if kind in ("jsonl", "csv", "parquet"):
        section["text_field"] = "body"
    bad = BadRecords(1000, say=lambda line: None)
    parsed = json.loads if kind in ("chat", "preferences") else str
    found = [(parsed(one.text), one.metadata) for one in make_source(ADAPTER.validate_python(section)).documents(bad)]
    return found, [reason.partition(": ")[2] for reason in bad.shown]


class Draw:
    """Rows at random. The name of a field tells its type, because a column has one type.

    An object has some of the fields, and none that is null: that could not be told from what a schema adds. `number` is
    in every object, because a struct without fields cannot be stored.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def text(self) -> str:
        return "".join(
            self.random.choices(["a", " ", "é", "東", '"', "\n", "x, y", "\0", "🙂"], k=self.random.randrange(5))
        )

    def some(self, always: Row, fields: dict[str, Callable[[], Any]]) -> Row:
        return always | {name: make() for name, make in fields.items() if self.random.random() < 0.5}

    def scalars(self) -> Row:
        fields = {"text": self.text, "share": self.random.random, "flag": lambda: self.random.random() < 0.5}
        return self.some({"number": self.random.randrange(9)}, fields)

    def nested(self, depth: int = 2) -> Row:
        fields: dict[str, Callable[[], Any]] = {
            "numbers": lambda: self.random.choices([None, 1, 2], k=self.random.randrange(3)),
            "object": lambda: self.nested(depth - 1),
            "objects": lambda: [self.nested(depth - 1) if depth else None for _ in range(self.random.randrange(3))],
        }
        return self.scalars() | (self.some({}, fields) if depth else {})

    def chat(self) -> Row:
        question = self.some({"role": "user", "content": self.text()}, {"name": self.text})
        answer = self.some({"role": "assistant", "content": self.text()}, {"tool_calls": lambda: [self.nested()]})
        fields: dict[str, Callable[[], Any]] = {
            "tools": lambda: [self.nested(), self.nested()],
            "system": self.text,
            "extra": self.nested,
        }
        return self.some({"messages": [question, answer]}, fields)

    def pair(self) -> Row:
        chosen, rejected = ({"role": "assistant", "content": self.text(), "object": self.nested()} for _ in range(2))
        return self.some({"prompt": self.text() + "?", "chosen": [chosen], "rejected": [rejected]}, {"id": self.text})

    def document(self) -> Row:
        objects = {"object": self.scalars, "outer": lambda: {"number": 1, "inner": self.scalars()}}
        return self.some({"body": self.text(), **self.scalars()}, objects)


@pytest.mark.parametrize("kind", ["chat", "preferences"])
def test_conversations(kind: str, tmp_path: Path) -> None:
    for seed in range(5):
        draw = Draw(seed)
        rows = [draw.chat() if kind == "chat" else draw.pair() for _ in range(4)]
        expected = read(tmp_path, "rows.jsonl", rows, kind)
        assert len(expected[0]) == len(rows)
        for name in ("rows.jsonl.gz", "rows.jsonl.zst", "rows.parquet", "plain.parquet"):
            assert read(tmp_path, name, rows, kind) == expected, (name, seed)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.zst", "rows.parquet", "plain.parquet"])
def test_texts(name: str, tmp_path: Path) -> None:
    for seed in range(20):
        draw = Draw(seed)
        rows = [draw.document() for _ in range(4)]
        expected = read(tmp_path, "rows.jsonl", rows, "jsonl")
        assert [text for text, _ in expected[0]] == [row["body"] for row in rows]
        assert read(tmp_path, name, rows, name.split(".")[1]) == expected, seed


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.zst", "rows.parquet", "rows.csv"])
def test_texts_of_a_streamed_dataset(name: str, tmp_path: Path) -> None:
    draw = Draw(2)
    rows = [{"body": draw.text(), "id": f"n{n}"} if name == "rows.csv" else draw.document() for n in range(20)]
    expected = read(tmp_path, "rows.jsonl", rows, "jsonl")
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / name).write_bytes(FILES[name](rows))
    assert streamed(tmp_path / "dataset", "body") == expected


def streamed(folder: Path, text_field: str = "text") -> tuple[list[Any], list[str]]:
    """Text and metadata of the documents of a dataset, and its bad records without their numbers."""
    bad = BadRecords(1000, say=lambda line: None)
    section = ADAPTER.validate_python({"kind": "huggingface", "name": str(folder), "text_field": text_field})
    found = [(one.text, one.metadata) for one in make_source(section).documents(bad)]
    return found, [reason.partition(": ")[2] for reason in bad.shown]


def text_rows(name: str, count: int = 3, **more: Any) -> list[Row]:
    return [{"text": f"{name} {number}", **more} for number in range(count)]


@pytest.mark.parametrize(
    ("first", "second"), [({"url": None}, {"url": "u"}), ({}, {"extra": {"a": 1}}), ({"id": 1}, {"id": "x"})]
)
@pytest.mark.parametrize("ending", ["jsonl", "json", "json.gz"])
def test_columns_that_are_not_needed_may_differ(ending: str, first: Row, second: Row, tmp_path: Path) -> None:
    rows = {"a": text_rows("a", **first), "b": text_rows("b", **second)}
    for name, file in rows.items():
        (tmp_path / f"{name}.{ending}").write_bytes(gzip.compress(lines(file)) if ending[-2:] == "gz" else lines(file))
    found, bad = streamed(tmp_path)
    assert [{"text": text, **metadata} for text, metadata in found] == rows["a"] + rows["b"]
    assert bad == []


def damaged_containers() -> dict[str, tuple[bytes, str]]:
    texts = lines([{"text": hashlib.shake_256(b"%d" % number).hexdigest(99)} for number in range(3000)])
    page = parquet(text_rows("b", 3000))
    squeezed = {"gz": gzip.compress(texts), "zst": zstandard.ZstdCompressor(write_checksum=True).compress(texts)}
    found = {f"b.jsonl.{name}": (data[: len(data) // 2], "file is damaged") for name, data in squeezed.items()}
    altered = bytearray(squeezed["gz"])
    altered[5000:5050] = bytes(50)
    return found | {
        "b1.jsonl.gz": (bytes(altered), "the compressed file is damaged"),
        "b2.jsonl.gz": (texts, "the compressed file is damaged"),
        "b.parquet": (page[:999] + bytes(99) + page[1098:], "is not readable Parquet"),
        "b1.parquet": (page[:99], "is not readable Parquet"),
        "b.jsonl": (lines(text_rows("b")) + b"{\n", "b.jsonl:4: is not JSON"),
        "b.json.gz": (squeezed["gz"][: len(squeezed["gz"]) // 2], "the compressed file is damaged"),
        "b.json": (lines(text_rows("b")) + b"{\n", "b.json:4: is not JSON"),
        "b1.jsonl": (b'{"text": 3}\n', "b1.jsonl:1: field 'text' is not a string"),
        "b.csv": (b"id,text\n1,a, b\n", "b.csv:2: has 3 columns"),
    }


@pytest.mark.parametrize(("name", "damage"), damaged_containers().items())
def test_a_bad_file_is_named_and_the_next_one_is_read(
    name: str, damage: tuple[bytes, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = name.partition(".")[2]
    write = CONTAINERS[kind if kind in CONTAINERS else kind.replace("json", "jsonl", 1)]
    for other in "ac":
        (tmp_path / name.replace("b", other)).write_bytes(write(text_rows(other)))
    (tmp_path / name).write_bytes(damage[0])
    found, bad = streamed(tmp_path)
    texts = [text for text, _ in found]
    expected = [row["text"] for row in text_rows("a") + text_rows("c")]
    assert [text for text in texts if text in expected] == expected
    assert bad
    assert f"{tmp_path}/{name}" in bad[0]
    assert damage[1] in bad[0]


def test_images_that_nobody_asked_for_are_not_read(tmp_path: Path) -> None:
    import datasets

    rows = [{"text": f"text {number}", "image": {"bytes": b"no image", "path": "a.png"}} for number in range(3)]
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    table = pa.Table.from_pylist(rows).replace_schema_metadata(features.arrow_schema.metadata)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert streamed(tmp_path) == ([(row["text"], {}) for row in rows], [])


def test_files_of_other_formats(tmp_path: Path) -> None:
    """They are read by datasets. A bad one ends the preparation with a sentence."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("one\ntwo\n")
    assert streamed(folder) == ([("one", {}), ("two", {})], [])
    folder = tmp_path / "json"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(text_rows("a")))
    assert [text for text, _ in streamed(folder)[0]] == ["a 0", "a 1", "a 2"]
    (folder / "b.json").write_text("[{")
    with pytest.raises(CorpusError, match=r"cannot be read after row 3: .*use kind: jsonl, parquet or csv") as caught:
        streamed(folder)
    assert caught.value.exit_code == 3
    (folder / "a.json").write_text(json.dumps({"text": "over\nseveral lines"}, indent=1))
    (folder / "b.json").unlink()
    assert [text for text, _ in streamed(folder)[0]] == ["over\nseveral lines"]


def test_a_folder_is_no_connection(tmp_path: Path) -> None:
    """What is wrong with a folder is not blamed on the network."""
    with pytest.raises(CorpusError, match=r"Check the files of this folder, and data\.source\.config_name and split$"):
        streamed(tmp_path)


@pytest.mark.parametrize("name", ["/{}/own.txt", "../own.txt", "/{}/o*.txt", "file:///{}/own.jsonl", "../own.parquet"])
def test_a_dataset_cannot_name_files_of_the_user(name: str, tmp_path: Path) -> None:
    """A README.md from elsewhere says which files a dataset has."""
    for suffix, content in {"txt": b"own", "jsonl": lines(text_rows("a")), "parquet": parquet(text_rows("a"))}.items():
        (tmp_path / f"own.{suffix}").write_bytes(content)
    folder = tmp_path / "dataset"
    folder.mkdir()
    path = name.format(str(tmp_path).lstrip("/"))
    header = {"configs": [{"config_name": "default", "data_files": [{"split": "train", "path": path}]}]}
    (folder / "README.md").write_text(f"---\n{json.dumps(header)}\n---\n")
    with pytest.raises(CorpusError, match=r"names a file that is none of its own: .*own\..*use kind"):
        streamed(folder)
    (folder / "README.md").unlink()
    (folder / "a.txt").write_text("one")
    assert streamed(folder)[0] == [("one", {})]


@pytest.mark.parametrize("address", ["/etc/hosts.txt", "https://a.example/b.jsonl", "zip://a.txt::/etc/b.zip"])
def test_a_dataset_of_the_hub_has_files_of_the_hub(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    builder = SimpleNamespace(config=SimpleNamespace(data_files={"valid": [], "train": [address]}))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *arguments, **options: builder)
    source = make_source(ADAPTER.validate_python({"kind": "huggingface", "name": "a/b"}))
    with pytest.raises(CorpusError, match=r"none of its own: "):
        next(source.records("a/b/train"))


def test_code_in_a_dataset_is_not_run(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in {"1.txt": b"one", "1.pth": pickle.dumps(os.getcwd, protocol=2)}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    with pytest.raises(CorpusError, match=r": a file asks for code, which is never run\. ") as caught:
        streamed(tmp_path, "txt")
    assert "weights_only" not in str(caught.value)
    (tmp_path / "a.tar").unlink()
    (tmp_path / "README.md").write_text("---\na: !!python/object/apply:os.getcwd []\n---\n")
    with pytest.raises(CorpusError, match=r"cannot read .*could not determine a constructor"):
        streamed(tmp_path)


def test_files_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read where they are. A connection that breaks off is no bad file, and reading goes on from there."""
    import datasets
    import huggingface_hub

    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(text_rows("a"))))
    (tmp_path / "b.parquet").write_bytes(parquet(text_rows("b")))
    (tmp_path / "c.jsonl").write_bytes(lines(text_rows("c")))
    within_reach = ["a.jsonl.gz", "b.parquet"]

    class Hub:
        def open(self, address: str, mode: str) -> Any:
            if address.rpartition("/")[2] not in within_reach:
                raise ConnectionError("reset by peer")
            return (tmp_path / address.rpartition("/")[2]).open("rb")

        def size(self, address: str) -> int:
            return (tmp_path / address.rpartition("/")[2]).stat().st_size

    @dataclasses.dataclass
    class Config:
        data_files: dict[str, list[str]] | None = None

    addresses = [f"hf://datasets/a/b@main/{name}" for name in ("a.jsonl.gz", "b.parquet", "c.jsonl")]
    builder = SimpleNamespace(config=Config({"train": addresses}))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *arguments, **options: builder)
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", Hub)
    source = make_source(ADAPTER.validate_python({"kind": "huggingface", "name": "a/b"}))
    records = source.records("a/b/train")
    read_before = [next(records) for _ in range(5)]
    checkpoint = json.loads(json.dumps(source.checkpoint()))
    read_before.append(next(records))
    with pytest.raises(CorpusError, match=r"reset by peer.*the preparation is then resumed"):
        next(records)
    within_reach.append("c.jsonl")
    rest = list(source.records("a/b/train", checkpoint))
    assert [record.number for record in rest] == [6, 7, 8, 9]
    texts = [source.parse(record.raw)[0] for record in read_before[:5] + rest]
    assert texts == [f"{name} {number}" for name in "abc" for number in range(3)]


def test_comma_separated_texts(tmp_path: Path) -> None:
    draw = Draw(1)
    rows = [{"body": draw.text(), "title": draw.text(), "id": str(number)} for number in range(50)]
    assert read(tmp_path, "rows.csv", rows, "csv") == read(tmp_path, "rows.jsonl", rows, "jsonl")


@pytest.mark.parametrize("kind", ["csv", "huggingface"])
@pytest.mark.parametrize(
    ("lines", "found", "bad"),
    [
        (["id,body", "1,one, and more", '2,"two, and more"', "3,three,", "4,four"], ["two, and more", "four"], [2, 4]),
        (
            ["body,id", "one", "and more,1", '"two', 'and more",2', "three,3"],
            ["and more", "two\nand more", "three"],
            [2],
        ),
        (["body,id", "one,1", "body,id", "two,2"], ["one", "two"], [3]),
    ],
    ids=["commas", "line ends", "header"],
)
def test_a_text_is_not_cut_without_quotes(
    kind: str, lines: list[str], found: list[str], bad: list[int], tmp_path: Path
) -> None:
    """Nothing tells which of the cells are one text, also where the last one is empty."""
    path = tmp_path / "a.csv"
    path.write_text("\n".join(lines) + "\n")
    counted = BadRecords(10, say=lambda line: None)
    given = {"name": str(tmp_path)} if kind == "huggingface" else {"paths": [str(path)]}
    section = ADAPTER.validate_python({"kind": kind, "text_field": "body", **given})
    assert [document.text for document in make_source(section).documents(counted)] == found
    assert [re.search(r"a\.csv:(\d+): (has|is the header)", shown)[1] for shown in counted.shown] == [*map(str, bad)]


def read_parquet(
    path: Path, table: pa.Table, kind: str = "chat", written: Row | None = None, **options: Any
) -> tuple[list[Any], BadRecords]:
    """The documents of a table, written with options, and the bad records."""
    pyarrow.parquet.write_table(table, path, **(written or {}))
    bad = BadRecords(1000, say=lambda line: None)
    section = ADAPTER.validate_python({"kind": kind, "paths": [str(path)]})
    return list(make_source(section, **options).documents(bad)), bad


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN"])
@pytest.mark.parametrize("kind", ["parquet", "chat"])
def test_every_encoding_of_texts(kind: str, encoding: str, tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(20)]
    turns = [[TURNS[0], TURNS[1] | {"content": text}] for text in texts]
    table = pa.table({"text": texts} if kind == "parquet" else {"messages": turns})
    column = "text" if kind == "parquet" else "messages.list.element.content"
    written = {"use_dictionary": False, "column_encoding": {column: encoding}, "row_group_size": 7}
    found, bad = read_parquet(tmp_path / "a.parquet", table, kind, written)
    read_texts = [one.text if kind == "parquet" else json.loads(one.text)["messages"][1]["content"] for one in found]
    assert (read_texts, bad.count) == (texts, 0)


@pytest.mark.parametrize("kind", [pa.string_view(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_every_type_of_texts(kind: pa.DataType, tmp_path: Path) -> None:
    texts = ["one", "", "a longer text than a view holds"]
    columns = {"text": pa.array(texts).cast(kind), "more": pa.array([b"a", None, b"b"], pa.binary_view())}
    found, bad = read_parquet(tmp_path / "a.parquet", pa.table(columns), "parquet")
    assert ([one.text for one in found], bad.shown) == (texts, [])
    turns = pa.table({"instruction": columns["text"], "output": columns["text"], "more": columns["more"]})
    found, bad = read_parquet(tmp_path / "b.parquet", turns, "chat")
    assert ([json.loads(one.text)["messages"][1]["content"] for one in found], bad.shown) == (texts, [])


def test_damage_of_any_kind_is_a_bad_record(tmp_path: Path) -> None:
    """Bytes that are changed, removed or added anywhere, also in the metadata of a Parquet file."""
    found = 0
    for seed in range(70):
        draw = Draw(seed)
        kind, row = draw.random.choice([("chat", draw.chat), ("preferences", draw.pair), ("parquet", draw.document)])
        names = ["rows.parquet", "plain.parquet"] + ["rows.jsonl.gz", "rows.jsonl.zst"] * (kind != "parquet")
        name = draw.random.choice(names)
        data = bytearray(FILES[name]([row() for _ in range(3)]))
        for _ in range(draw.random.randrange(1, 4)):
            place = draw.random.randrange(len(data))
            new = bytes(draw.random.randrange(256) for _ in range(draw.random.choice([0, 1, 1, 1, 20])))
            data[place : place + draw.random.choice([0, 1, 1, 1, 20])] = new
        (tmp_path / name).write_bytes(data)
        bad = BadRecords(1000, say=lambda line: None)
        section: Row = {"kind": kind, "paths": [str(tmp_path / name)]}
        section |= {"text_field": "body"} if kind == "parquet" else {}
        try:
            list(make_source(ADAPTER.validate_python(section)).documents(bad))
            found += bad.count > 0
        except CorpusError:  # the column of the texts has another name now
            assert kind == "parquet"
    assert found > 45


NAMES = ["messages", "conversations", "role", "from", "content", "value", "tool_calls", "tools", "system", "history"]
NAMES += ["instruction", "input", "output", "prompt", "chosen", "rejected", "type", "text"]
VALUES = [None, True, 3, 0.5, "", "user", "assistant", "gpt", "text", "\ud800", "[[1]]", "Human: a\n\nAssistant: b"]


def any_value(draw: random.Random, depth: int = 3) -> Any:
    kind = draw.randrange(4) if depth else 0
    if kind < 2:
        return draw.choice(VALUES)
    if kind == 2:
        return [any_value(draw, depth - 1) for _ in range(draw.randrange(3))]
    return {name: any_value(draw, depth - 1) for name in draw.sample(NAMES, draw.randrange(4))}


def nest(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("kind", ["chat", "preferences"])
def test_a_record_of_any_values_is_a_conversation_or_bad(kind: str, tmp_path: Path) -> None:
    """Each field has one of its values, or any other one."""
    rows: list[Any] = []
    for seed in range(600):
        draw = Draw(seed)
        row = draw.chat() if kind == "chat" else draw.pair()
        if draw.random.random() < 0.3:
            row = {"instruction": "a", "output": "b", "prompt": "p", "chosen": "c", "rejected": "d"}
        rows.append(row | {name: any_value(draw.random) for name in draw.random.sample(NAMES, 2)})
    for depth in (90, 300, 900):
        deep = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "tool_calls": nest(depth)}]
        rows += [{"messages": deep, "chosen": deep, "rejected": deep}, {"messages": TURNS, "tools": nest(depth)}]
        rows += [{"messages": TURNS, "tools": json.dumps(nest(depth))}, {"messages": TURNS, "tools": "[" * 5000}]
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    bad = BadRecords(10**4, say=lambda line: None)
    section = ADAPTER.validate_python({"kind": kind, "paths": [str(tmp_path)]})
    found = [from_json(document.text) for document in make_source(section).documents(bad)]
    assert [one.mapped(str.upper).contents() for one in found] == [one.contents().upper() for one in found]
    assert len(found) > 100
    assert bad.count > 100
    assert len(found) + bad.count == len(rows)


def test_the_reason_of_a_bad_record_is_short(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"messages": [{"role": "x" * 10**5, "content": ""}]}]))
    bad = BadRecords(1, say=lambda line: None)
    list(make_source(ADAPTER.validate_python({"kind": "chat", "paths": [str(tmp_path)]})).documents(bad))
    assert len(bad.shown[0]) < 2000


def test_values_without_a_form_in_json(tmp_path: Path) -> None:
    """Dates have their text; a map is an object with the fields of its row; binary data are left out."""
    when = datetime.datetime(2024, 5, 6, 7, 8, 9)
    turn = pa.struct({"role": pa.string(), "content": pa.string(), "at": pa.timestamp("us"), "of": pa.decimal128(3, 1)})
    row = [turns | {"at": when, "of": decimal.Decimal("1.5")} for turns in TURNS]
    table = pa.table(
        {
            "messages": pa.array([row], pa.list_(turn)),
            "day": pa.array([when.date()]),
            "labels": pa.array([[("a", "b"), ("c", None)]], pa.map_(pa.string(), pa.string())),
            "page": pa.array([b"\xff"]),
            "images": pa.array([[{"bytes": b"\xff", "path": "x"}]]),
        }
    )
    (found,), bad = read_parquet(tmp_path / "a.parquet", table)
    assert bad.count == 0
    expected = [{**message, "at": "2024-05-06T07:08:09", "of": 1.5} for message in TURNS]
    assert json.loads(found.text)["messages"] == expected
    assert found.metadata == {"day": "2024-05-06", "labels": {"a": "b", "c": None}}


def test_an_image_among_the_turns_is_a_bad_record(tmp_path: Path) -> None:
    parts = [{"type": "image", "text": None, "image": {"bytes": b"\xff"}}, {"type": "text", "text": "what?"}]
    table = pa.table({"messages": pa.array([[{"role": "user", "content": parts}]])})
    found, bad = read_parquet(tmp_path / "a.parquet", table)
    assert found == []
    assert bad.shown == [f"{tmp_path}/a.parquet:1: turn 1 has a part that is not text; only text can be trained on"]


@pytest.mark.parametrize(("kind", "name"), [("parquet", "text"), ("chat", "messages"), ("csv", "text")])
def test_two_columns_of_the_name_that_is_needed(kind: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind.replace('chat', 'parquet')}"
    if kind == "csv":
        path.write_text("text,id,text\na,1,b\n")
    else:
        columns = [pa.array(["a"]), pa.array([1]), pa.array(["b"])]
        pyarrow.parquet.write_table(pa.Table.from_arrays(columns, [name, "id", name]), path)
    with pytest.raises(CorpusError, match=rf"{path} has 2 columns '{name}'.*rename or remove one"):
        list(make_source(ADAPTER.validate_python({"kind": kind, "paths": [str(path)]})).documents(BadRecords(0, print)))


@pytest.mark.parametrize("kind", ["parquet", "chat"])
def test_of_two_other_columns_of_one_name_the_last_is_taken(kind: str, tmp_path: Path) -> None:
    """As of two fields of a JSON object."""
    columns = [pa.array(["T"]), pa.array([TURNS]), pa.array(["first"]), pa.array(["second"])]
    table = pa.Table.from_arrays(columns, ["text", "messages", "id", "id"])
    (found,), _ = read_parquet(tmp_path / "a.parquet", table, kind)
    assert found.metadata["id"] == "second"


def bomb(kind: str, value: str, rows: int) -> pa.Table:
    """A table of one long value, as numbers of a dictionary."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([value]))
    if kind == "parquet":
        return pa.table({"text": column})
    message = pa.StructArray.from_arrays([pa.array(["user"] * rows), column], names=["role", "content"])
    return pa.table({"messages": pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), message)})


@pytest.mark.parametrize("kind", ["parquet", "chat"])
@pytest.mark.parametrize(("length", "rows", "max_expansion"), [(2**20, 3200, 1000), (100, 50_000, 1), (0, 10_000, 1)])
def test_what_a_parquet_file_expands_to_is_bounded(
    kind: str, length: int, rows: int, max_expansion: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes of one value, or rows without end, in a few kilobytes."""
    if length < 2**20:
        monkeypatch.setattr(files, "MIN_EXPANSION_LIMIT", 2**16)
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    table = bomb(kind, "x" * length, rows)
    earlier = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        found, bad = read_parquet(tmp_path / "a.parquet", table, kind, max_expansion=max_expansion)
    finally:
        pa.set_memory_pool(earlier)
    limit = files.expansion_limit(tmp_path / "a.parquet", max_expansion)
    assert limit < 2**28
    assert bad.shown[-1].endswith(f"raise data.max_expansion={max_expansion}")
    assert f"it expands to more than {max_expansion} times its size" in bad.shown[-1]
    assert len(found) <= min(rows - 1, limit // max(length, 1))
    assert pool.max_memory() < 2**28


def test_a_page_that_expands_too_far_is_not_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MIN_EXPANSION_LIMIT", 2**16)
    table = pa.table({"text": ["x" * 2**16] * 65})
    options = {"use_dictionary": False, "compression": "zstd"}
    found, bad = read_parquet(tmp_path / "a.parquet", table, "parquet", options, max_expansion=100)
    assert found == []
    assert "it expands to more than 100 times its size" in bad.shown[0]
    found, bad = read_parquet(tmp_path / "a.parquet", table, "parquet", options, max_expansion=10**4)
    assert (len(found), bad.count) == (65, 0)


@pytest.mark.parametrize("inner", [pa.string(), pa.struct([("role", pa.string())]), pa.list_(pa.int8(), 1)])
def test_values_that_take_no_bytes_are_counted(
    inner: pa.DataType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of 400 million nulls is a file of 600 bytes."""
    monkeypatch.setattr(files, "MIN_EXPANSION_LIMIT", 2**16)
    nulls = pa.nulls(2**14, inner)
    table = pa.table({"messages": pa.ListArray.from_arrays(pa.array([0, 2**14], pa.int32()), nulls)})
    monkeypatch.setattr(parquet_files, "_row_bytes", None)  # nor are they counted one by one
    found, bad = read_parquet(tmp_path / "a.parquet", table, "chat", {"compression": "zstd"}, max_expansion=1)
    assert found == []
    assert "it expands to more than 1 times its size" in bad.shown[0]


def test_the_least_bytes_of_nested_values() -> None:
    lists = pa.array([[None], ["ab" * 9, ""], [], None], pa.list_(pa.string()))
    of_three = pa.array([["", None, "abcdefghi"]], pa.list_(pa.string(), 3))
    maps = pa.array([[("a", None)]], pa.map_(pa.string(), pa.string()))
    assert [parquet_files._bytes_of(array).tolist() for array in (lists, of_three, maps)] == [[8, 26, 0, 0], [25], [8]]
