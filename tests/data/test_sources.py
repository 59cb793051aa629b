"""Every kind of source, read from small files; and every way in which a corpus can be broken."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import sysconfig
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from containers import comma_separated, lines
from pydantic import TypeAdapter

from cdrmix.config import schema_data as schema
from cdrmix.data.pipeline.reading import COLUMNS, Cleaning, Part, Quota, units, write_rows
from cdrmix.data.sources import SOURCES, files, make_source
from cdrmix.data.sources.base import BadRecords, Document, Record, Source
from cdrmix.errors import CorpusError, DiskFullError

ADAPTER: TypeAdapter[schema.Source] = TypeAdapter(schema.Source)
TEXTS = ["one\n", "", 'zwei "drei", vier', "naïve\r\n東京🙂\0 end", "x" * 200_000]


def read(section: dict[str, Any], *, limit: int = 100) -> tuple[list[Document], BadRecords]:
    bad = BadRecords(limit, say=lambda line: None)
    return list(make_source(ADAPTER.validate_python(section)).documents(bad)), bad


def jsonl(texts: list[str]) -> bytes:
    return lines([{"text": text, "n": 1} for text in texts])


def as_csv(texts: list[str]) -> bytes:
    return comma_separated([{"id": str(index), "text": text} for index, text in enumerate(texts)])


def parquet(texts: list[str], kind: pyarrow.DataType | None = None) -> bytes:
    stream = io.BytesIO()
    table = pyarrow.table({"id": range(len(texts)), "text": pyarrow.array(texts, kind or pyarrow.string())})
    pyarrow.parquet.write_table(table, stream, row_group_size=2)
    return stream.getvalue()


def digits(number: int) -> str:
    """Digits that do not compress away, so that what stands before some damage_message in the middle can be read."""
    return hashlib.shake_256(str(number).encode()).hexdigest(200)


def zstd(data: bytes) -> bytes:
    """Two frames, as appending to a compressed file makes them."""
    compress = zstandard.ZstdCompressor().compress
    return compress(data[:10]) + compress(data[10:])


FORMATS: dict[str, tuple[str, Callable[[list[str]], bytes]]] = {
    "corpus.jsonl": ("jsonl", jsonl),
    "corpus.jsonl.gz": ("jsonl", lambda texts: gzip.compress(jsonl(texts))),
    "corpus.jsonl.zst": ("jsonl", lambda texts: zstd(jsonl(texts))),
    "crlf_and_bom.jsonl": ("jsonl", lambda texts: b"\xef\xbb\xbf" + jsonl(texts).replace(b"\n", b"\r\n\r\n")),
    "corpus.csv": ("csv", as_csv),
    "bom.csv": ("csv", lambda texts: b"\xef\xbb\xbf" + as_csv(texts)),
    "corpus.csv.gz": ("csv", lambda texts: gzip.compress(as_csv(texts))),
    "corpus.csv.zst": ("csv", lambda texts: zstd(as_csv(texts))),
    "corpus.parquet": ("parquet", parquet),
    "large.parquet": ("parquet", lambda texts: parquet(texts, pyarrow.large_string())),
    "dictionary.parquet": (
        "parquet",
        lambda texts: parquet(texts, pyarrow.dictionary(pyarrow.int8(), pyarrow.string())),
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    kind, write = FORMATS[name]
    (tmp_path / name).write_bytes(write(TEXTS))
    documents, bad = read({"kind": kind, "paths": [str(tmp_path / name)]})
    assert [document.text for document in documents] == TEXTS
    assert bad.count == 0
    assert len({document.id for document in documents}) == len(TEXTS)
    assert {document.source for document in documents} == {kind}


def test_text_files_are_documents_bytes_and_all(tmp_path: Path) -> None:
    for index, text in enumerate(TEXTS):
        (tmp_path / f"{index}.txt").write_bytes(text.encode())
    (tmp_path / "5.txt").write_bytes(b"\xef\xbb\xbfwith a byte order mark")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    documents, bad = read({"kind": "text", "paths": [str(tmp_path)]})
    assert [document.text for document in documents] == [*TEXTS, "with a byte order mark"]
    assert bad.count == 0


def test_files_folders_and_globs_are_sorted_and_read_once(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "b/1.jsonl", "a/3.jsonl.gz", "a/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        data = jsonl([name])
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    expected = ["a/3.jsonl.gz", "b/1.jsonl", "b/2.jsonl"]
    for paths in (["."], ["b", "a"], ["b/2.jsonl", "**/*.jsonl*"], ["*", "b/1.jsonl"]):
        documents, _ = read({"kind": "jsonl", "paths": [str(tmp_path / path) for path in paths]})
        assert [document.text for document in documents] == expected, paths


@pytest.mark.parametrize("path", ["nowhere.jsonl", "nowhere/", "*.jsonl", "empty_folder"])
def test_paths_that_lead_nowhere(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty_folder").mkdir()
    with pytest.raises(CorpusError, match=r"data\.source\.paths: no") as caught:
        read({"kind": "jsonl", "paths": [str(tmp_path / path)]})
    assert caught.value.exit_code == 3
    assert str(tmp_path) in str(caught.value)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["x"]))

    def refuse(*arguments: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CorpusError, match=r"cannot read .*a\.jsonl: Permission denied"):
        read({"kind": "jsonl", "paths": [str(path)]})


BAD_LINES = {
    b"{": "is not JSON",
    b"not json at all": "is not JSON",
    b'{"text": "a\x01b"}': "is not JSON",
    b"[" * 100_000: "is not usable JSON",
    b'{"n": ' + b"1" * 5000 + b"}": "is not usable JSON",
    b'["text"]': "is a JSON list, not an object",
    b'{"body": "x"}': "has no field 'text'",
    b'{"text": 3}': "field 'text' is not a string",
    b'{"text": null}': "field 'text' is not a string",
    b'{"text": "\xff"}': "invalid UTF-8",
    b'{"text": "\\ud800"}': "not valid UTF-8",
    b'{"text": "x", "text": "y"}': "has the field 'text' twice in one object",
    b'{"text": "x", "n": [{"b": 1, "a": 2, "a": 2}]}': "has the field 'a' twice in one object",
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=[str(line[:20]) for line in BAD_LINES])
def test_a_malformed_line_is_counted_with_its_place_and_skipped(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "before"}\n' + line + b'\n{"text": "after"}')
    documents, bad = read({"kind": "jsonl", "paths": [str(path)]})
    assert [document.text for document in documents] == ["before", "after"]
    assert bad.count == 1
    assert bad.shown[0].startswith(f"{path}:2: ")
    assert reason in bad.shown[0]


def test_beyond_the_limit_the_last_bad_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"no\n" * 20)
    said: list[str] = []
    bad = BadRecords(8, say=said.append)
    source = make_source(ADAPTER.validate_python({"kind": "jsonl", "paths": [str(path)]}))
    with pytest.raises(
        CorpusError, match=r"9 bad records .*data\.max_bad_records=8 .*a\.jsonl:9: is not JSON"
    ) as caught:
        list(source.documents(bad))
    assert caught.value.exit_code == 3
    assert bad.count == 9
    assert len(said) == 5  # a few are shown, all are counted


def test_an_over_long_line_is_bad_and_its_neighbours_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_RECORD_BYTES", 1000)
    for size, expected in ((950, 3), (1100, 2), (3_000_000, 2)):
        path = tmp_path / "a.jsonl"
        path.write_bytes(jsonl(["before", "x" * size, "after"]))
        documents, bad = read({"kind": "jsonl", "paths": [str(path)]})
        assert len(documents) == expected
        assert [document.text for document in (documents[0], documents[-1])] == ["before", "after"]
        assert bad.shown == ([] if expected == 3 else [f"{path}:2: is longer than 1000 bytes"])
    (tmp_path / "a.txt").write_bytes(b"x" * 1001)
    assert read({"kind": "text", "paths": [str(tmp_path / "a.txt")]})[1].count == 1


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "text"])
@pytest.mark.parametrize("damage_message", ["cut", "altered", "not compressed"])
def test_a_damaged_compressed_file(tmp_path: Path, kind: str, suffix: str, damage_message: str) -> None:
    texts = [digits(index) for index in range(3000)]
    data = as_csv(texts) if kind == "csv" else jsonl(texts)
    whole = gzip.compress(data) if suffix == "gz" else zstandard.ZstdCompressor(write_checksum=True).compress(data)
    middle = len(whole) // 2
    damaged = {
        "cut": whole[:middle],
        "altered": whole[:middle] + bytes(byte ^ 255 for byte in whole[middle : middle + 50]) + whole[middle + 50 :],
        "not compressed": data,
    }[damage_message]
    path = tmp_path / f"a.{kind}.{suffix}"
    path.write_bytes(damaged)
    documents, bad = read({"kind": kind, "paths": [str(path)]})
    assert 0 < bad.count <= 100
    if kind != "text" and damage_message == "cut":
        assert bad.count == 1
        assert [document.text for document in documents] == texts[: len(documents)]
        assert len(documents) > 100
    with pytest.raises(CorpusError, match=r"the first is .* the compressed file is damaged"):
        read({"kind": kind, "paths": [str(path)]}, limit=bad.count - 1)


def test_csv_rows_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'id,text\r\n1,good\r\n2\r\n3,"two\nlines"\r\n4,\xff\r\n\r\n5,"last"\r\n')
    documents, bad = read({"kind": "csv", "paths": [str(path)]})
    assert [document.text for document in documents] == ["good", "two\nlines", "last"]
    short = "has 1 columns, and the header has 2; a text with a comma or a line end must be in quotes"
    assert bad.shown == [f"{path}:3: {short}", f"{path}:6: the text is not valid UTF-8"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1"])
def test_a_csv_header_that_is_not_utf8(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.csv").write_bytes("größe,text\n1,one\n".encode(encoding))
    with pytest.raises(CorpusError, match=r"the header of .*a\.csv is not UTF-8; convert the file") as caught:
        read({"kind": "csv", "paths": [str(tmp_path)], "text_field": "body"})
    assert caught.value.exit_code == 3


def test_an_over_long_csv_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_RECORD_BYTES", 1000)
    path = tmp_path / "a.csv"
    path.write_bytes(as_csv(["before", "x" * 1001, "after"]))
    documents, bad = read({"kind": "csv", "paths": [str(path)]})
    assert [document.text for document in documents] == ["before", "after"]
    assert bad.shown == [f"{path}:3: is longer than 1000 bytes"]


@pytest.mark.parametrize(
    ("row", "reason", "lost"),
    [
        ('3,"he said "no" twice"', "is not CSV: ',' expected after '\"'", 0),
        ('3,"never closed', "is not CSV: unexpected end of data; skipped to line 6", 2),
        ('3,"closed by the next but one\r\n4,text4\r\n5,"x', "is not CSV: ',' expected after '\"'", 0),
    ],
)
def test_a_stray_quote_is_a_bad_record_with_its_line(tmp_path: Path, row: str, reason: str, lost: int) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(f"id,text\r\n1,text1\r\n2,text2\r\n{row}\r\n6,text6\r\n7,text7\r\n".encode())
    documents, bad = read({"kind": "csv", "paths": [str(path)]})
    assert [document.text for document in documents] == ["text1", "text2", "text6", "text7"][: 4 - lost]
    assert bad.count == 1
    assert bad.shown[0].startswith(f"{path}:4: {reason}")


def over_one_line(size: int) -> bytes:
    return b"text\r\nbefore\r\n" + b"x" * size + b"\r\nafter\r\n"


def over_many_lines(size: int) -> bytes:
    row = b",".join([b'"' + b"x" * 20 + b'\n"'] * (size // 24))
    return b"text\r\nbefore\r\n" + row + b"\r\n" + b"after\r\n"


@pytest.mark.parametrize("make", [over_one_line, over_many_lines])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_over_long_csv_record_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[int], bytes], suffix: str
) -> None:
    """Megabytes that compress to next to nothing, without a line end or as one record of many lines.

    After a line the next one is read; in the middle of a record of many lines nothing tells where the next begins.
    """
    monkeypatch.setattr(files, "MAX_RECORD_BYTES", 2**16)
    data = make(2**24 if make is over_one_line else 2**18)
    path = tmp_path / f"a.csv{suffix}"
    path.write_bytes(gzip.compress(data, 1) if suffix else data)
    tracemalloc.start()
    try:
        documents, bad = read({"kind": "csv", "paths": [str(path)]}, limit=10**6)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert bad.shown[0] == f"{path}:3: is longer than 65536 bytes"
    assert [document.text for document in documents] == ["before", "after"][: 2 if make is over_one_line else 1]
    assert peak < 2**23  # pieces of a megabyte, in bytes and as text, and what modules keep


@pytest.mark.parametrize("kind", ["parquet", "huggingface"])
def test_an_over_long_record_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(files, "MAX_RECORD_BYTES", 1000)
    (tmp_path / "a.parquet").write_bytes(parquet(["before", "é" * 501, "é" * 500]))
    index = {"name": str(tmp_path)} if kind == "huggingface" else {"paths": [str(tmp_path)]}
    documents, bad = read({"kind": kind, **index})
    assert [document.text for document in documents] == ["before", "é" * 500]
    assert bad.count == 1
    assert bad.shown[0].endswith(":2: is longer than 1000 bytes")


def test_csv_lines_may_end_in_carriage_returns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'text\rone\r"two\rlines"\r')
    documents, bad = read({"kind": "csv", "paths": [str(tmp_path)]})
    assert [document.text for document in documents] == ["one", "two\rlines"]
    assert bad.count == 0


@pytest.mark.parametrize(("kind", "data"), [("csv", as_csv(["x"])), ("parquet", parquet(["x"]))])
def test_a_missing_column_is_an_error_at_once(tmp_path: Path, kind: str, data: bytes) -> None:
    path = tmp_path / f"a.{kind}"
    path.write_bytes(data)
    with pytest.raises(CorpusError, match=r"data\.source\.text_field: no column 'body' .*its columns are: id, text"):
        read({"kind": kind, "paths": [str(path)], "text_field": "body"})


def test_a_parquet_column_of_numbers_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet(["x"]))
    with pytest.raises(CorpusError, match=r"holds int64, not strings"):
        read({"kind": "parquet", "paths": [str(tmp_path)], "text_field": "id"})


def test_parquet_rows_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    not_utf8 = pyarrow.array([b"good", None, b"\xff", b"last"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": not_utf8}), path)
    documents, bad = read({"kind": "parquet", "paths": [str(path)]})
    assert [document.text for document in documents] == ["good", "last"]
    assert [line.split(": ")[0] for line in bad.shown] == [f"{path}:2", f"{path}:3"]


@pytest.mark.parametrize("damage_message", ["cut", "altered"])
def test_a_damaged_parquet_file(tmp_path: Path, damage_message: str) -> None:
    whole = parquet([digits(index) for index in range(1000)])
    quarter = len(whole) // 4
    damaged = whole[:quarter] if damage_message == "cut" else whole[:quarter] + bytes(quarter) + whole[2 * quarter :]
    (tmp_path / "a.parquet").write_bytes(damaged)
    documents, bad = read({"kind": "parquet", "paths": [str(tmp_path)]})
    assert "is not readable Parquet" in bad.shown[-1]
    assert len(documents) < 1000


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"line\nline \xe9\n")
    documents, bad = read({"kind": "text", "paths": [str(tmp_path)]})
    assert documents == []
    assert bad.shown == [f"{tmp_path}/a.txt: line 2: invalid UTF-8 (byte 0xe9 at offset 10)"]


PAGE = "<html><head>{}<title>T</title></head><body><p>Übergröße ist schön: {}</p></body></html>"
META = '<meta charset="{}">'
HTTP = "<META HTTP-EQUIV='Content-Type' CONTENT='text/html; charset={}'>"


@pytest.mark.parametrize(
    ("head", "encoding", "extra"),
    [
        ("", "utf-8", "東"),
        ("", "utf-8-sig", "東"),
        ("", "utf-16", "東"),
        (META.format("ISO-8859-1"), "cp1252", "“x”"),
        (META.format("iso-8859-1"), "utf-8", "東"),  # what it declares is wrong
        (HTTP.format("windows-1250"), "cp1250", "ő"),
        ("<!-- " + META.format("koi8-r") + " -->" + HTTP.format("iso-8859-15"), "iso8859-15", "€"),
        ("<?xml version='1.0' encoding='gb2312'?>", "gb18030", "中文"),
        (META.format("iso-2022-jp"), "iso2022_jp_2", "東京"),
    ],
)
def test_the_encoding_of_a_page(head: str, encoding: str, extra: str, tmp_path: Path) -> None:
    page = PAGE.format(head, extra)
    if encoding in ("iso2022_jp_2", "gb18030"):
        page = page.replace("Übergröße ist schön", "東京")
    (tmp_path / "a.html").write_bytes(page.encode(encoding))
    (document,), bad = read({"kind": "html", "paths": [str(tmp_path)]})
    assert (document.text, bad.count) == (page, 0)


@pytest.mark.parametrize(
    ("head", "body", "reason"),
    [
        ("", b"\xe9", "line 1: invalid UTF-8 (byte 0xe9 at offset 84), and it declares no other encoding"),
        (META.format("utf-8"), b"\xe9", "it declares 'utf-8'"),
        (META.format("no-such-name"), b"\xe9", "it declares 'no-such-name'"),
        (META.format("rot13"), b"\xe9", "it declares 'rot13'"),
        (META.format("shift_jis"), b"\xff\xff", "is not in the encoding that it declares, 'shift_jis'"),
    ],
)
def test_a_page_in_no_encoding_that_it_declares(head: str, body: bytes, reason: str, tmp_path: Path) -> None:
    page = PAGE.replace("Übergröße ist schön: {}", "BODY").format(head).encode().replace(b"BODY", b"a " * 20 + body)
    (tmp_path / "a.html").write_bytes(page)
    documents, bad = read({"kind": "html", "paths": [str(tmp_path)]})
    assert documents == []
    assert reason in bad.shown[0]


def test_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {
        "a.py": b"x = '\xc3\xa9'\r\n",
        "latin.py": b"# -*- coding: latin-1 -*-\nx = '\xe9'\n",
        "mark.py": b"\xef\xbb\xbfx = 1\n",
        "undecodable.py": b"x = '\xe9'\n",
        "unknown.py": b"# coding: no-such-encoding\n",
        "package/z.py": b"z",
        "package/data.txt": b"not Python",
        "test/t.py": b"t",
        "package/tests/t.py": b"t",
        "idlelib/idle_test/t.py": b"t",
        "lib2to3/tests/t.py": b"t",
        "site-packages/p.py": b"p",
        "dist-packages/p.py": b"p",
        "__pycache__/c.py": b"c",
    }
    for name, data in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    documents, bad = read({"kind": "stdlib"})
    assert {document.id: document.text for document in documents} == {
        "a.py": "x = 'é'\r\n",
        "latin.py": "# -*- coding: latin-1 -*-\nx = 'é'\n",
        "mark.py": "x = 1\n",
        "package/z.py": "z",
    }
    assert [line.split(":")[0] for line in bad.shown] == ["undecodable.py", "unknown.py"]


def test_a_python_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(CorpusError, match=r"no \.py files under"):
        read({"kind": "stdlib"})


def test_the_installed_standard_library_is_there() -> None:
    documents = make_source(schema.StdlibSource(kind="stdlib")).documents(BadRecords(0, say=print))
    first = [next(documents) for _ in range(20)]
    assert [document.id for document in first] == sorted(document.id for document in first)
    assert "__future__.py" in {document.id for document in first}


def test_hugging_face_reads_a_dataset_folder(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(jsonl(["one", "two"]) + b'{"text": null, "n": 1}\n')
    documents, bad = read({"kind": "huggingface", "name": str(tmp_path)})
    assert [document.text for document in documents] == ["one", "two"]
    assert bad.count == 1
    with pytest.raises(CorpusError, match="its columns are: text, n"):
        read({"kind": "huggingface", "name": str(tmp_path), "text_field": "body"})
    with pytest.raises(CorpusError, match=r"cannot read .*'nope'.*Check the files of this folder") as caught:
        read({"kind": "huggingface", "name": str(tmp_path), "split": "nope"})
    assert caught.value.exit_code == 3


class Rows:
    """A streamed dataset of these rows."""

    features = None

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


@dataclass
class BuilderConfig:
    """The options of a builder."""

    data_files: None = None


class Builder:
    """A builder of datasets for files of another format, as `load_dataset_builder` gives one."""

    config = BuilderConfig()

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self.rows = rows

    def as_streaming_dataset(self, split: str) -> Rows:
        return Rows(self.rows)


def test_hugging_face_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(CorpusError, match=r"cannot stream .*someone/something.*HF_HUB_OFFLINE") as caught:
        read({"kind": "huggingface", "name": "someone/something"})
    assert caught.value.exit_code == 3

    def break_off() -> Any:
        yield {"text": "one"}
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *arguments, **options: Builder(break_off()))
    with pytest.raises(CorpusError, match=r"reset by peer.*the preparation is then resumed"):
        read({"kind": "huggingface", "name": "someone/something"})

    def fill_up() -> Any:
        yield {"text": "one"}
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise RuntimeError("cannot cache") from error

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *arguments, **options: Builder(fill_up()))
    with pytest.raises(DiskFullError, match=r"someone/something.*HF_HOME.*What was prepared is kept"):
        read({"kind": "huggingface", "name": "someone/something"})


def test_a_hugging_face_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def load(*arguments: Any, **options: Any) -> Any:
        asked.append(options["revision"])
        return Builder([{"text": "one"}])

    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    sections = [{"kind": "huggingface", "name": "someone/something", **more} for more in ({}, {"revision": "v2"})]
    for section in sections:
        assert read(section)[0][0].text == "one"
    assert asked == [None, "v2"]
    plain, fixed = (make_source(ADAPTER.validate_python(section)) for section in sections)
    assert plain.identity() != fixed.identity()
    assert "revision 'v2'" in fixed.describe()


class Numbers(Source):
    """Ten records; the checkpoint is the number of the last one."""

    kind = "numbers"

    def __init__(self) -> None:
        self.parse = lambda raw: (str(raw), {})
        self.number = 0

    def identity(self) -> list[Any]:
        return []

    def describe(self) -> str:
        return "numbers"

    def parts(self) -> list[str]:
        return ["all"]

    def records(self, part: str, checkpoint: Any = None) -> Iterator[Record]:
        for self.number in range((checkpoint or 0) + 1, 11):
            yield Record(self.number, self.number, 1)

    def checkpoint(self) -> Any:
        return self.number


def test_finished_units_count_for_the_quota(tmp_path: Path) -> None:
    """Of at most five records, two are in a finished unit: three are left, and they are the next ones."""
    cleaning = Cleaning(0, 0, False, None, False, None, schema.Filters(), ())
    part = Part("a", ("all",), Numbers(), cleaning, tmp_path, unit_bytes=2)
    write_rows(part.unit(0), {name: [] for name in COLUMNS.names}, {"records": 2, "checkpoint": 2})
    left = [(unit.path, [record.raw for _, record in unit.records]) for unit in units(part, Quota(5))]
    assert left == [(part.unit(1), [3, 4]), (part.unit(2), [5])]


def test_every_kind_of_the_schema_has_a_source() -> None:
    kinds = {section.model_fields["kind"].annotation.__args__[0] for section in schema.Source.__origin__.__args__}
    assert {*SOURCES.names(), "plugin"} == kinds


def test_a_path_with_dots_is_the_same_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["one"]))
    (tmp_path / "b").mkdir()
    direct, by_dots = (
        make_source(ADAPTER.validate_python({"kind": "jsonl", "paths": [str(path)]}))
        for path in (tmp_path / "a.jsonl", tmp_path / "b" / ".." / "a.jsonl")
    )
    assert direct.identity() == by_dots.identity()
