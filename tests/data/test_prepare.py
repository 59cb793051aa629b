"""Preparation from end to end: exact text, honest splits, reuse by key, and nothing half-made left behind."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from cdrmix.config.schema import Config
from cdrmix.data.cleaning.normalize import normalize
from cdrmix.data.dedup import minhash as dedup
from cdrmix.data.pipeline import filter_report
from cdrmix.data.pipeline.reading import split_hash
from cdrmix.data.prepare import prepare
from cdrmix.data.shards import ShardSet
from cdrmix.data.sources.tables import JsonLines
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError, CorpusError, DiskFullError, ShardError, VocabularyError


def quiet(line: str) -> None:
    pass


def write(path: Path, texts: Iterable[str]) -> dict[str, Any]:
    """A JSON-lines file of texts and the `data.source` section that names it."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"kind": "jsonl", "paths": [str(path)]}


def clean(texts: Iterable[str]) -> list[str]:
    """What is left of texts: normal, in order, those without a visible character left out."""
    return sorted(text for text in map(normalize, texts) if text.strip())


def decoded(shards: ShardSet) -> list[str]:
    return [text.decode() for split in (shards.train, shards.valid) for text in split.text()]


def test_the_text_comes_back_exactly(make_config: Any, corpus: dict[str, Any], texts: list[str]) -> None:
    said: list[str] = []
    shards = prepare(make_config(corpus), say=said.append)
    assert sorted(decoded(shards)) == clean(texts)
    assert shards.train.documents + shards.valid.documents == len(clean(texts))
    for split in (shards.train, shards.valid):
        assert split.text_bytes == sum(map(len, split.text()))
        assert split.token_counts()[split.end_of_text_id] == split.documents
    assert shards.tokenizer_fingerprint == TextTokenizer.load(shards.tokenizer_path).fingerprint
    assert shards.vocab_size == 320
    report = shards.report
    assert report["documents"] == len(clean(texts))
    assert report["text_bytes"] == sum(len(text.encode()) for text in clean(texts))
    assert report["bad_records"] == 0
    assert report["filtered"] == {"empty": 1}
    assert said[-1].startswith(f"Prepared {len(clean(texts))} documents, ")
    merging = next(number for number, line in enumerate(said) if line.startswith("Merging pairs of 0.0"))
    assert said[merging + 1].startswith("Tokenizer trained on 0.0")


def test_the_same_corpus_gives_the_same_bytes(make_config: Any, corpus: dict[str, Any], tmp_path: Path) -> None:
    one, other = (prepare(make_config(corpus, cache=str(tmp_path / name)), say=quiet).path for name in ("one", "other"))
    assert one.name == other.name
    for file in one.iterdir():
        if file.is_file():
            assert file.read_bytes() == (other / file.name).read_bytes(), file.name


def test_a_text_is_always_on_the_same_side(make_config: Any, texts: list[str], tmp_path: Path) -> None:
    """Independent of the other documents and of their order; so exact duplicates are in the same split."""
    once = prepare(make_config(write(tmp_path / "a.jsonl", texts)), say=quiet)
    more = prepare(make_config(write(tmp_path / "b.jsonl", [*reversed(texts), "new", *texts])), say=quiet)
    assert set(once.valid.text()) - {b"new"} == set(more.valid.text()) - {b"new"}
    assert not set(more.valid.text()) & set(more.train.text())


def test_held_out_text_never_reaches_the_tokenizer(
    make_config: Any, corpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    train = TextTokenizer.train

    def spy(texts: Iterable[str], **options: Any) -> TextTokenizer:
        seen.extend(texts)
        return train(seen, **options)

    monkeypatch.setattr(TextTokenizer, "train", spy)
    shards = prepare(make_config(corpus), say=quiet)
    assert seen == [text.decode() for text in shards.train.text()]
    seen.clear()
    prepare(make_config(corpus, tokenizer={"train_bytes": 500}), say=quiet)
    assert sum(len(text.encode()) for text in seen[:-1]) < 500 <= sum(len(text.encode()) for text in seen)


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
def test_two_documents_are_enough(make_config: Any, tmp_path: Path, fraction: float) -> None:
    shards = prepare(make_config(write(tmp_path / "a.jsonl", ["a", "b", "a"]), valid_fraction=fraction), say=quiet)
    assert (set(shards.valid.text()), set(shards.train.text())) in (({b"a"}, {b"b"}), ({b"b"}, {b"a"}))
    assert min(shards.train.rows, shards.valid.rows) >= 1
    if fraction < 0.1:
        assert set(shards.valid.text()) == {min("ab", key=split_hash).encode()}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "0 documents are left of 0 read"),
        (["", ""], "0 documents are left of 2 read, after 2 by empty"),
        (["one"], "1 documents are left of 1 read"),
        (["same", "same"], "1 documents are left of 2 read, after 1 by exact_duplicate"),
    ],
)
def test_a_corpus_without_two_texts(make_config: Any, tmp_path: Path, texts: list[str], message: str) -> None:
    with pytest.raises(CorpusError, match=rf"{message}.*at least two different documents") as caught:
        prepare(make_config(write(tmp_path / "a.jsonl", texts)), say=quiet)
    assert caught.value.exit_code == 3
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir() and path.suffix != ".work"]


def test_bad_records_are_counted_reported_and_skipped(make_config: Any, texts: list[str], tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", texts)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('nonsense\n{"text": ""}\n{"body": "x"}\n')
    said: list[str] = []
    shards = prepare(make_config(source, max_bad_records=2), say=said.append)
    assert sorted(decoded(shards)) == clean(texts)
    assert (shards.report["bad_records"], shards.report["filtered"]["empty"]) == (2, 2)
    where = f"{tmp_path}/a.jsonl:{len(texts) + 1}"
    assert [line for line in said if where in line] == [
        f"skipped a bad record: {where}: is not JSON: Expecting value (column 1)"
    ]
    assert "2 bad records" in said[-1]
    with pytest.raises(CorpusError, match=rf"2 bad records .*a\.jsonl:{len(texts) + 1}: is not JSON"):
        prepare(make_config(source, max_bad_records=1), say=quiet)


def test_only_the_first_documents(make_config: Any, corpus: dict[str, Any], texts: list[str]) -> None:
    assert sorted(decoded(prepare(make_config(corpus, max_documents=20), say=quiet))) == clean(texts[:20])


def test_other_sources_go_the_same_way(make_config: Any, texts: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for index, text in enumerate(texts):
        (folder / f"{index:02d}.txt.gz").write_bytes(gzip.compress(text.encode()))
    shards = prepare(make_config({"kind": "text", "paths": [str(folder)]}), say=quiet)
    assert sorted(decoded(shards)) == clean(texts)


def test_a_second_run_reuses_the_shards_without_reading_the_text(
    make_config: Any, corpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare(make_config(corpus), say=quiet)

    def read(*arguments: Any) -> None:
        raise AssertionError("the corpus was read again")

    monkeypatch.setattr(JsonLines, "records", read)
    said: list[str] = []
    second = prepare(make_config(corpus), say=said.append)
    assert second.path == first.path
    assert decoded(second) == decoded(first)
    assert said[0].startswith("Reusing prepared text")


def test_whatever_decides_the_content_decides_the_key(make_config: Any, corpus: dict[str, Any], tmp_path: Path) -> None:
    path = Path(corpus["paths"][0])
    stamp = path.stat().st_mtime_ns
    found = [prepare(make_config(corpus), say=quiet).path]
    changes = ({"row_length": 32}, {"vocab_size": 300}, {"valid_fraction": 0.3}, {"tokenizer": {"end_of_text": "<e>"}})
    found += [prepare(make_config(corpus, **data), say=quiet).path for data in changes]
    (tmp_path / "tokenizer.json").write_bytes((found[0] / "tokenizer.json").read_bytes())
    loaded = {"path": str(tmp_path / "tokenizer.json")}
    found.append(prepare(make_config(corpus, tokenizer=loaded), say=quiet).path)
    (tmp_path / "tokenizer.json").write_bytes((found[2] / "tokenizer.json").read_bytes())
    found.append(prepare(make_config(corpus, tokenizer=loaded), say=quiet).path)
    os.utime(path, ns=(stamp, stamp + 1))
    found.append(prepare(make_config(corpus), say=quiet).path)
    path.write_text(path.read_text() + '{"text": "another"}\n')
    os.utime(path, ns=(stamp, stamp))
    found.append(prepare(make_config(corpus), say=quiet).path)
    assert len(set(found)) == len(found) == 9


def test_the_fingerprint_is_of_the_text_not_of_its_files(
    make_config: Any, corpus: dict[str, Any], tmp_path: Path
) -> None:
    first = prepare(make_config(corpus), say=quiet)
    path = Path(corpus["paths"][0])
    os.utime(path, (1, 1))
    touched = prepare(make_config(corpus), say=quiet)
    moved = prepare(make_config({"kind": "jsonl", "paths": [str(path.rename(tmp_path / "b.jsonl"))]}), say=quiet)
    assert len({first.key, touched.key, moved.key}) == 3
    assert first.fingerprint == touched.fingerprint == moved.fingerprint
    lines = (tmp_path / "b.jsonl").read_text().splitlines()
    path.write_text("\n".join([*lines[1:], lines[0]]))
    assert prepare(make_config(corpus), say=quiet).fingerprint == first.fingerprint
    path.write_text("\n".join(lines[1:]))
    assert prepare(make_config(corpus), say=quiet).fingerprint != first.fingerprint


def test_a_tokenizer_from_a_file(make_config: Any, corpus: dict[str, Any], tmp_path: Path) -> None:
    trained = prepare(make_config(corpus), say=quiet)
    path = tmp_path / "tokenizer.json"
    path.write_bytes(trained.tokenizer_path.read_bytes())
    shards = prepare(make_config(corpus, vocab_size=1000, tokenizer={"path": str(path)}), say=quiet)
    assert shards.tokenizer_fingerprint == trained.tokenizer_fingerprint
    assert shards.vocab_size == len(shards.train.token_counts()) == 1000
    assert decoded(shards) == decoded(trained)
    with pytest.raises(VocabularyError, match=r"has 320 ids, more than model\.vocab_size=319") as caught:
        prepare(make_config(corpus, vocab_size=319, tokenizer={"path": str(path)}), say=quiet)
    assert caught.value.exit_code == 7
    with pytest.raises(ConfigError, match=r"data\.tokenizer\.path: cannot read"):
        prepare(make_config(corpus, tokenizer={"path": str(tmp_path / "none.json")}), say=quiet)


def test_damaged_shards_are_refused_not_rebuilt(make_config: Any, corpus: dict[str, Any]) -> None:
    path = prepare(make_config(corpus), say=quiet).path
    (path / "train.tokens-00000.bin").write_bytes(b"")
    with pytest.raises(ShardError, match=r"train\.tokens-00000\.bin has 0 bytes"):
        prepare(make_config(corpus), say=quiet)
    os.remove(path / "index.json")
    with pytest.raises(ShardError, match="holds no finished shards"):
        prepare(make_config(corpus), say=quiet)


def test_a_full_disk(make_config: Any, corpus: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFullError, match=r"disk is full.*data\.cache") as caught:
            prepare(make_config(corpus), say=quiet)
    assert caught.value.exit_code == 6
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir() and path.suffix != ".work"]
    prepare(make_config(corpus), say=quiet)


def test_a_cache_that_is_no_folder(make_config: Any, corpus: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data\.cache: cannot write below"):
        prepare(make_config(corpus, cache=str(tmp_path / "file")), say=quiet)


PROCESS = """
import os, signal, sys, time
from cdrmix.config.schema import Config
from cdrmix.data import prepare as module
mode = sys.argv[2]
write_index = module.write_index
def interfere(*arguments):
    if mode == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)  # long enough for the other process to come to the same place
    write_index(*arguments)
module.write_index = interfere
print(module.prepare(Config.model_validate_json(sys.argv[1])).train.tokens)
"""


def start(config: Config, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROCESS, config.model_dump_json(), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_preparation_leaves_nothing_that_looks_finished(
    make_config: Any, corpus: dict[str, Any], tmp_path: Path
) -> None:
    config = make_config(corpus)
    with start(config, "die") as process:
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    left = [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert len(left) == 1
    assert left[0].startswith(".")
    shards = prepare(config, say=quiet)
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [shards.path]


@pytest.mark.slow  # two new interpreters
def test_two_preparations_at_once(make_config: Any, corpus: dict[str, Any], tmp_path: Path) -> None:
    config = make_config(corpus)
    with start(config, "wait") as one, start(config, "wait") as other:
        outputs = [process.communicate()[0] for process in (one, other)]
    assert (one.returncode, other.returncode) == (0, 0)
    assert sum("Prepared 59 documents" in output for output in outputs) == 1
    assert sum("Reusing prepared text" in output for output in outputs) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


def test_another_machine_is_waited_for_while_it_gives_signs_of_life(
    make_config: Any, corpus: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system whose locks do not hold between machines."""
    prepared = prepare(make_config(corpus), say=quiet).path
    shutil.rmtree(prepared)
    lock = tmp_path / "cache" / f".{prepared.name}.lock"
    lock.write_text("elsewhere 1")
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:  # no sign any more
            os.utime(lock, (time.time() - 61,) * 2)

    monkeypatch.setattr("cdrmix.durable.time.sleep", sleep)
    said: list[str] = []
    assert prepare(make_config(corpus), say=said.append).path == prepared
    assert said[0] == "Process 1 on elsewhere is preparing this text; waiting for it"
    assert len(waits) == 3
    assert lock.read_text() == ""


def test_work_on_text_that_has_changed_is_removed_in_the_end(make_config: Any, corpus: dict[str, Any]) -> None:
    prepared = prepare(make_config(corpus), say=quiet).path
    for name, days in (("new", 6), ("old", 8), ("held", 8)):
        runner = prepared.with_name(f".{name}.work")
        runner.mkdir()
        (runner / "read.json").write_text("{}")
        for path in (runner / "read.json", runner):
            os.utime(path, (time.time() - days * 24 * 3600,) * 2)
    shutil.rmtree(prepared)
    with prepared.with_name(".held.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        prepare(make_config(corpus), say=quiet)
    assert sorted(path.name for path in prepared.parent.glob("*.work")) == [".held.work", ".new.work"]


def test_fingerprints_are_joined_block_by_block(
    make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half of the texts come twice but for a last word, so that some held-out ones have a near duplicate.
    words = [" ".join(f"w{number}x{index}" for index in range(200)) for number in range(30)]
    source = write(tmp_path / "a.jsonl", [*words, *(f"{text} end" for text in words[:15])])
    exact = {"near_duplicates": False}
    expected = prepare(make_config(source, dedup=exact), say=quiet).report["held_out_near_duplicates"]
    assert 0 < expected < 15
    sizes: list[int] = []
    join = dedup.near_duplicates

    def spy(one: Any, other: Any, *, radius: int) -> Any:
        sizes.append(max(len(one), len(other)))
        return join(one, other, radius=radius)

    monkeypatch.setattr(dedup, "near_duplicates", spy)
    monkeypatch.setattr(dedup, "BLOCK", 4)
    report = prepare(
        make_config(source, cache=str(tmp_path / "other"), dedup={"near_duplicates": False}), say=quiet
    ).report
    assert report["held_out_near_duplicates"] == expected
    assert max(sizes) == 4
    assert len(sizes) == -(-report["valid"]["documents"] // 4) * -(-report["train"]["documents"] // 4)


def test_without_a_lock_the_first_to_finish_wins(
    make_config: Any, corpus: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system whose locks do not hold: the folder appears while this process makes its own."""
    write_report = filter_report.write

    def finish_first(folder: Path, *arguments: Any) -> None:
        write_report(folder, *arguments)
        shutil.copytree(folder.parent, tmp_path / "cache" / folder.parent.parent.name.split(".")[1])

    monkeypatch.setattr(filter_report, "write", finish_first)
    shards = prepare(make_config(corpus), say=quiet)
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [shards.path]
