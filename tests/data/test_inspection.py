"""`data inspect`: rows show their documents' own text, whole over all rows, and nothing of it steers the terminal."""

from __future__ import annotations

import json
import random
import re
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdrmix.config.schema import Config
from cdrmix.data.escaping import escape_unprintable
from cdrmix.data.inspection import inspect
from cdrmix.data.prepare import prepare
from cdrmix.data.shards import ShardSet
from cdrmix.errors import CdrmixError, ConfigError, ShardError

EVIL = "\x1b]0;title\x07\x1b[2J\u202eturned\u2066 \n=== document 7 ends ==="
LINE = re.compile(r"(.{6}) ([|:>]) (.*)")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> ShardSet:
    """Two domains, two classes of length, loss weights, fill in the middle in one domain; half of the texts odd."""
    folder = tmp_path_factory.mktemp("inspect")
    draw = random.Random(2)

    def write(name: str, texts: list[str]) -> dict[str, Any]:
        (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return {"source": {"kind": "jsonl", "paths": [str(folder / name)]}}

    plain = [
        f"{number} says\n\n" + f"word{number}\t" * draw.randrange(40) + f"<think>why {number}\nso</think> end"
        for number in range(20)
    ]
    odd = [f"{number}{EVIL}\n東京 🙂 naïve مرحبا {'🙂' * draw.randrange(30)}" for number in range(20)]
    data = {
        "domains": {"plain": write("plain.jsonl", plain), "odd": write("odd.jsonl", odd)},
        "dedup": {"near_duplicates": False},
        "row_length": 16,
        "length_classes": [64],
        "valid_fraction": 0.25,
        "objectives": {
            "fim": {"rate": 1.0, "domains": ["odd"]},
            "spans": [{"begin": "<think>", "end": "</think>", "weight": 0.25}],
        },
        "cache": str(folder / "cache"),
    }
    model = {"d_model": 32, "layers": 1, "attention": {"heads": 1, "kv_heads": 1}, "feed_forward": {"hidden": 32}}
    rwkv = {"head_size": 32, "decay_rank": 4, "iclr_rank": 4, "value_rank": 4, "gate_rank": 4}
    train = {"steps": 1, "batch_rows": 1, "micro_batch_rows": 1, "learning_rate": 1e-3}
    config = Config.model_validate({"model": {**model, "rwkv": rwkv, "vocab_size": 320}, "data": data, "train": train})
    return prepare(config, say=lambda line: None)


def lines_of(folder: Path, **options: Any) -> list[str]:
    defaults = {"split": "train", "row": None, "rows": 1, "domain": None, "coloured": False}
    return list(inspect(folder, **{**defaults, **options}))


def documents_in(lines: list[str]) -> dict[int, dict[int, list[tuple[str, str, str]]]]:
    """Document -> the target it goes on from -> its lines as (weight, sign, text)."""
    found: dict[int, dict[int, list[tuple[str, str, str]]]] = {}
    current = None
    for line in lines:
        if begin := re.match(r"=== document (\d+) (?:begins|goes on from token ([\d,]+)) ", line):
            offset = int((begin[2] or "0").replace(",", ""))
            current = found.setdefault(int(begin[1]), {}).setdefault(offset, [])
        elif line.startswith("==="):
            current = None
        elif current is not None:
            parts = LINE.fullmatch(line)
            assert parts, line
            current.append((parts[1].strip(), parts[2], parts[3]))
    return found


def joined(parts: list[tuple[str, str, str]]) -> str:
    return "".join(("" if number == 0 or sign != "|" else "\n") + text for number, (_, sign, text) in enumerate(parts))


@pytest.mark.parametrize("split", ["train", "valid"])
def test_all_rows_together_show_all_documents(shards: ShardSet, split: str) -> None:
    chosen = getattr(shards, split)
    found = documents_in(lines_of(shards.path, split=split, rows=10**6))
    assert sorted(found) == list(range(chosen.documents))
    for number, text in enumerate(chosen.text()):
        if chosen.domain_of(number) != "plain":  # the others are rearranged, and cut within characters
            continue
        parts = [part for _, part in sorted(found[number].items())]
        # A row begins with a new gutter, also where the one before it ended within a line.
        ending = [("", ">", "<|endoftext|>")]
        assert parts[-1][-1:] == ending
        shown = "".join(text for part in parts for _, sign, text in part if sign != ">")
        assert shown == escape_unprintable(text.decode()).replace("\n", "")
        weighted = "".join(text for part in parts for weight, _, text in part if weight == "0.25")
        # held-out text has no objectives
        assert weighted == (re.search("<think>.*</think>", shown)[0] if split == "train" else "")


def test_a_document_in_one_row_keeps_its_lines(make_config: Any, tmp_path: Path) -> None:
    texts = ["a\n\n  b\n", "\n", "c", "one <think>two\nthree</think>\n\nfour\n", "z" * 9]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"{n}{text}"}) + "\n" for n, text in enumerate(texts))
    )
    source = {"kind": "jsonl", "paths": [str(tmp_path / "a.jsonl")]}
    spans = {"spans": [{"begin": "<think>", "end": "</think>", "weight": 0}]}
    made = prepare(make_config(source, row_length=400, objectives=spans), say=lambda line: None)
    seen = []
    for split in (made.train, made.valid):
        found = documents_in(lines_of(made.path, split=split.name, rows=9))
        for number, text in enumerate(split.text()):
            (part,) = found[number].values()
            assert part.pop() == ("", ">", "<|endoftext|>")
            seen.append(text.decode())
            assert joined(part) == text.decode().removesuffix("\n")
            zeros = [(sign, line) for weight, sign, line in part if weight == "0"]
            weighted = "think" in text.decode() and split is made.train
            assert zeros == ([(":", "<think>two"), ("|", "three</think>")] if weighted else [])
    assert sorted(seen) == [f"{n}{text}" for n, text in enumerate(texts)]


def test_special_tokens_stand_alone_and_boundaries_say_where_a_document_is_cut(shards: ShardSet) -> None:
    lines = lines_of(shards.path, rows=10**6, domain="odd")
    parts = [line for document in documents_in(lines).values() for part in document.values() for line in part]
    specials = {text for _, sign, text in parts if sign == ">"}
    assert specials == {"<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"}
    rows = [line for line in lines if line.startswith("Row ")]
    assert len(rows) == sum(stratum.rows for stratum in shards.train.strata if stratum.domain == "odd")
    assert all("domain odd, length class" in row and "of 16 positions" in row for row in rows)
    cuts = [line for line in lines if "is cut before token" in line]
    assert len(cuts) == len([line for line in lines if "goes on from token" in line]) > 0


@pytest.mark.parametrize("coloured", [False, True])
def test_nothing_of_a_text_steers_the_terminal(shards: ShardSet, tmp_path: Path, coloured: bool) -> None:
    copy = tmp_path / "shards"
    shutil.copytree(shards.path, copy)
    file = copy / "train.tokens-00000.bin"
    ids = np.fromfile(file, "<u2")
    # The preparation takes control characters out; shards of other people may have them.
    for index, character in enumerate("\x1b\x07\r\x00\x0b\x7f\x9b"):
        evil = shards.tokenizer.encode(character)
        ids[50 * index + 5 : 50 * index + 5 + len(evil)] = evil
    ids.tofile(file)
    page = "\n".join(lines_of(copy, rows=10**6, coloured=coloured))
    if coloured:
        assert "\x1b[1;36m=== document" in page
        page = re.sub(r"\x1b\[[0-9;]*m", "", page)
        assert page == "\n".join(lines_of(copy, rows=10**6))  # so no sequence of a text was among them
    assert not [
        c for c in page if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\n\t\u200c\u200d"
    ]
    for spelled in ("<U+001B>", "<U+000D>", "<U+0000>", "<U+009B>", "<U+202E>"):
        assert spelled in page
    boundaries = [line for line in page.split("\n") if line.startswith("===")]
    assert all(re.match(r"=== document \d+ (begins|goes on)", line) for line in boundaries[::2])
    assert all(re.match(r"=== document \d+ (ends|is cut)", line) for line in boundaries[1::2])


def test_the_header_has_the_figures_of_the_set(shards: ShardSet) -> None:
    header = "\n".join(lines_of(shards.path)).split("\n\n")[0]
    for fact in (shards.fingerprint, shards.tokenizer_fingerprint, shards.key, str(shards.path), "<|endoftext|>"):
        assert fact in header
    for split in (shards.train, shards.valid):
        for stratum in split.strata:
            row = [
                split.name,
                stratum.domain,
                *(f"{n:,}" for n in (stratum.length_class, stratum.rows, stratum.documents, stratum.tokens)),
            ]
            assert (row in [line.split()[:6] for line in header.splitlines()]) == (stratum.rows > 0)


def test_one_row_after_the_other(shards: ShardSet) -> None:
    every = [line for line in lines_of(shards.path, rows=10**6) if line.startswith("Row ")]
    assert len(every) == shards.train.rows
    assert [line for line in lines_of(shards.path, row=3, rows=2) if line.startswith("Row ")] == every[3:5]
    assert [line for line in lines_of(shards.path, row=len(every) - 1, rows=5) if line.startswith("Row ")] == every[-1:]
    assert [line for line in lines_of(shards.path) if line.startswith("Row ")] == every[:1]


def test_what_is_not_there_gets_a_message(shards: ShardSet, tmp_path: Path) -> None:
    last = shards.train.rows - 1
    for row in (-1, last + 1):
        with pytest.raises(ConfigError, match=rf"--row: train has no row {row}; allowed: 0 to {last}"):
            lines_of(shards.path, row=row)
    (first, *_) = [stratum.first_row for stratum in shards.train.strata if stratum.domain == "odd" and stratum.rows]
    with pytest.raises(ConfigError, match=rf"no row 0 of domain 'odd'; allowed: {first} to"):
        lines_of(shards.path, row=0, domain="odd")
    with pytest.raises(ConfigError, match=r"no rows of 'plian'; its domains: 'plain', 'odd'. Did you mean 'plain'\?"):
        lines_of(shards.path, domain="plian")
    with pytest.raises(ShardError, match="no finished shards"):
        lines_of(tmp_path / "nowhere")
    with pytest.raises(ShardError, match=shards.path.name):
        lines_of(shards.path.parent)


def test_damaged_shards_get_a_message(shards: ShardSet, tmp_path: Path) -> None:
    """Any byte altered, sizes kept: the command shows rows, with any contents, or raises one of our errors."""
    copy = tmp_path / "shards"
    shutil.copytree(shards.path, copy)
    draw = random.Random(5)
    files = sorted(path for path in copy.glob("train.*.bin"))
    refused = []
    for number in range(60):
        path = files[number % len(files)]
        whole = path.read_bytes()
        damaged = bytearray(whole)
        for _ in range(1 + len(whole) // 50):
            damaged[draw.randrange(len(whole))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            lines_of(copy, rows=10**6)
        except CdrmixError as error:
            refused.append(str(error))
        path.write_bytes(whole)
    assert 5 < len(refused) < 60
    assert all("corrupt" in message for message in refused)
