"""Shards: what was written is what is read, and what was altered is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdrmix.data.shard_files import write_index
from cdrmix.data.shard_writer import SplitWriter
from cdrmix.data.shards import FORMAT, SPLITS, ShardSet, Split, open_shards, token_dtype
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ShardError


def write(
    folder: Path,
    documents: list[list[int]],
    *,
    vocab_size: int = 300,
    shard_tokens: int = 10,
    domains: Sequence[int] = (),
    weights: list[list[float] | None] | None = None,
    length_classes: Sequence[int] = (),
) -> ShardSet:
    """Shards of token lists, of which both splits get the same; 0 ends each document.

    domains, weights: of each document, the weights of its tokens without the end-of-text.
    """
    folder.mkdir()
    splits, files = {}, {}
    for name in SPLITS:
        with SplitWriter(
            folder,
            name,
            vocab_size=vocab_size,
            shard_tokens=shard_tokens,
            row_length=4,
            domains=["0", "1", "2"] if domains else ["0"],
            length_classes=length_classes,
            weights=weights is not None,
        ) as writer:
            for number, ids in enumerate(documents):
                of_tokens = weights[number] if weights else None
                writer.add(
                    np.array([*ids, 0]),
                    len(ids),
                    domain=domains[number] if domains else 0,
                    weights=None if of_tokens is None else np.array([*of_tokens, 1], np.float32),
                )
            splits[name] = writer.close()
        files |= writer.files
    index = {
        "format": FORMAT,
        "key": "k",
        "vocab_size": vocab_size,
        "dtype": token_dtype(vocab_size),
        "shard_tokens": shard_tokens,
        "row_length": 4,
        "end_of_text": "<|endoftext|>",
        "end_of_text_id": 0,
        "tokenizer_fingerprint": "f",
        "splits": splits,
        "files": files,
        "report": {},
    }
    write_index(folder, index)
    return open_shards(folder)


@pytest.mark.parametrize("shard_tokens", [1, 3, 10, 1000])
@pytest.mark.parametrize("vocab_size", [300, 100_000])
def test_tokens_come_back_across_files(tmp_path: Path, shard_tokens: int, vocab_size: int) -> None:
    top = vocab_size - 1
    documents = [[1, 2, 3], [top], [], list(range(5, 30)), [7, 7]]
    stream = [0, *(token for ids in documents for token in [*ids, 0])]
    split = write(tmp_path / "s", documents, vocab_size=vocab_size, shard_tokens=shard_tokens).train
    assert split.tokens == len(stream)
    assert (split.documents, split.text_bytes) == (5, sum(map(len, documents)))
    assert len(list((tmp_path / "s").glob("train.tokens-*"))) == -(-len(stream) // shard_tokens)
    for start in range(0, len(stream), 3):
        for stop in range(start, len(stream) + 1, 5):
            assert split.read(start, stop).tolist() == stream[start:stop]
    targets = stream[1:]
    np.testing.assert_array_equal(split.token_counts(), np.bincount(targets, minlength=vocab_size))
    assert split.targets_in_rows(np.arange(split.rows)) == len(targets)
    assert split.targets_in_rows(np.zeros(2, np.int64)) == 2 * int(split.segments(0)[1].sum())


def test_ids_take_two_bytes_up_to_65536() -> None:
    assert (token_dtype(65_536), token_dtype(65_537)) == ("<u2", "<u4")
    assert np.array([65_535]).astype(token_dtype(65_536)).tolist() == [65_535]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return write(tmp_path / "s", [[1, 2, 3, 4, 5, 6], [7, 8]]).path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_file_is_guarded(written: Path, tmp_path: Path) -> None:
    """Each file in turn altered in one bit, cut short, made longer, removed."""
    assert len(names(written)) == 15
    for name in names(written):
        for damage_message in ("alter", "cut", "lengthen", "remove"):
            copy = tmp_path / f"{damage_message}-{name}"
            shutil.copytree(written, copy)
            file = copy / name
            data = file.read_bytes()
            if damage_message == "remove":
                file.unlink()
            else:
                altered = bytes([data[0] ^ 1]) + data[1:]
                file.write_bytes({"alter": altered, "cut": data[:-1], "lengthen": data + b"0"}[damage_message])
            with pytest.raises(ShardError) as caught:
                open_shards(copy)
            assert caught.value.exit_code == 4
            assert name in str(caught.value)


def test_the_message_gives_expected_and_found(written: Path) -> None:
    file = written / "train.tokens-00000.bin"
    expected = json.loads((written / "index.json").read_text())["files"][file.name]["sha256"]
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(ShardError, match=rf"train\.tokens-00000\.bin is corrupt.* not {expected}.*Delete the folder"):
        open_shards(written)
    file.write_bytes(b"\0")
    with pytest.raises(ShardError, match=r"has 1 bytes, not \d+"):
        open_shards(written)


def test_an_edited_index_is_refused(written: Path) -> None:
    text = (written / "index.json").read_text()
    (written / "index.json").write_text(text.replace('"vocab_size": 300', '"vocab_size": 301'))
    with pytest.raises(ShardError, match=r"index\.json is corrupt"):
        open_shards(written)


def test_another_format_is_refused(written: Path) -> None:
    index = json.loads((written / "index.json").read_text())
    del index["sha256"]
    write_index(written, {**index, "format": FORMAT + 1})
    with pytest.raises(ShardError, match=f"is of format {FORMAT + 1}; this version reads {FORMAT}"):
        open_shards(written)


def test_a_folder_that_holds_no_shards(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="holds no finished shards"):
        open_shards(tmp_path / "nowhere")


def test_shards_that_another_process_verified_are_opened_without_hashing(tmp_path: Path) -> None:
    shards = write(tmp_path / "s", [[1, 2, 3], [4, 5]])
    file = shards.path / "train.tokens-00000.bin"
    whole = file.read_bytes()
    file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert open_shards(shards.path, verify=False).train.tokens == shards.train.tokens
    with pytest.raises(ShardError, match="SHA-256"):
        open_shards(shards.path)
    file.write_bytes(whole[:-2])  # sizes are compared all the same
    with pytest.raises(ShardError, match="truncated"):
        open_shards(shards.path, verify=False)


documents_of_strata = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 20), st.sampled_from([None, 0.0, 0.25])), min_size=1, max_size=25
)


@given(documents_of_strata)
def test_rows_hold_documents_of_one_stratum(tmp_path_factory: pytest.TempPathFactory, drawn: list[Any]) -> None:
    """Documents of three domains and three classes of length, each of its own ids, against plain lists."""
    documents = [[1 + number] * length for number, (_, length, _) in enumerate(drawn)]
    split = write(
        tmp_path_factory.mktemp("s") / "s",
        documents,
        shard_tokens=7,
        domains=[domain for domain, _, _ in drawn],
        length_classes=[3, 9],
    ).train
    wanted: dict[tuple[str, int], list[int]] = {(str(d), c): [] for d in range(3) for c in range(3)}
    for number, (domain, length, _) in enumerate(drawn):
        wanted[str(domain), (length + 1 >= 3) + (length + 1 >= 9)].append(number)
    next_row, seen = 0, []
    assert [(stratum.domain, stratum.length_class) for stratum in split.strata] == list(wanted)
    for stratum, numbers in zip(split.strata, wanted.values(), strict=True):
        assert stratum.first_row == next_row
        next_row += stratum.rows
        assert stratum.documents == len(numbers)
        assert stratum.tokens == sum(len(documents[number]) + 1 for number in numbers)
        targets = [
            token
            for row in range(stratum.first_row, next_row)
            for start, length in zip(*split.segments(row), strict=True)
            for token in split.read(int(start) + 1, int(start) + int(length) + 1).tolist()
        ]
        assert sorted(targets) == sorted(token for number in numbers for token in [*documents[number], 0])
        seen += numbers
    assert split.rows == next_row
    assert sorted(seen) == list(range(len(drawn)))
    assert [split.domain_of(number) for number in range(len(drawn))] == [str(domain) for domain, _, _ in drawn]
    with pytest.raises(IndexError, match="document -1"):
        split.domain_of(-1)


@given(documents_of_strata)
def test_weights_lie_beside_their_tokens(tmp_path_factory: pytest.TempPathFactory, drawn: list[Any]) -> None:
    """Of every second token of a document with a weight; the order of the rows is that without weights."""
    documents = [[1 + number] * length for number, (_, length, _) in enumerate(drawn)]
    weights = [
        None if weight is None else [weight if position % 2 else 1.0 for position in range(length)]
        for _, length, weight in drawn
    ]
    folder = tmp_path_factory.mktemp("s")
    split = write(folder / "weighted", documents, shard_tokens=7, weights=weights).train
    plain = write(folder / "plain", documents, shard_tokens=7).train
    stream = [1.0] + [
        weight
        for ids, of_tokens in zip(documents, weights, strict=True)
        for weight in [*(of_tokens or [1.0] * len(ids)), 1.0]
    ]
    assert split.weighted == (set(stream) != {1.0})
    assert any(folder.glob("weighted/*weight*")) == split.weighted
    assert split.rows == plain.rows
    for row in range(split.rows):
        starts, lengths = split.segments(row)
        np.testing.assert_array_equal(starts, plain.segments(row)[0])
        expected = [stream[start + 1 : start + 1 + length] for start, length in zip(starts, lengths, strict=True)]
        total = sum(sum(of_segment) for of_segment in expected)
        assert split.weight_in_rows(np.array([row, row])) == 2 * total  # sums of quarters are exact
        if split.weighted:
            places = np.cumsum(lengths) - lengths
            found = np.full(int(lengths.sum()), -1, np.float32)
            split.copy_weights(starts, lengths, places, found)
            assert found.tolist() == [weight for of_segment in expected for weight in of_segment]


def test_one_domain_writes_the_files_that_it_always_did(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [4], [5] * 9]
    plain = write(tmp_path / "plain", documents)
    named = write(tmp_path / "named", documents, weights=[None, [1.0], None])
    assert names(plain.path) == names(named.path)
    assert plain.fingerprint == named.fingerprint


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_are_none(tmp_path: Path, weight: float) -> None:
    with pytest.raises(ValueError, match="weights are finite numbers of at least 0"):
        write(tmp_path / "s", [[1]], weights=[[weight]])


def test_too_many_weights(tmp_path: Path) -> None:
    values = [number / 8 for number in range(257)]  # 1 is among them
    assert write(tmp_path / "most", [[1] * 256], weights=[values[:256]]).train.weighted
    with pytest.raises(ValueError, match="more than 256 different loss weights"):
        write(tmp_path / "more", [[1] * 257], weights=[values])


def pieces_of(split: Split) -> list[tuple[int, str, int, int, int]]:
    return sorted(
        (piece.document, piece.text, piece.offset, piece.tokens, piece.document_tokens)
        for row in range(split.rows)
        for piece in split.pieces(row)
    )


def test_rows_decoded_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids 1 .. 26 stand for letters here; rows are of four positions, so that six tokens are cut."""
    shards = write(tmp_path / "s", [[1, 2], [3, 4, 5, 6, 7]], domains=[1, 0])

    class Letters:
        def decode_with_special_tokens(self, ids: list[int]) -> str:
            return "".join("." if token == 0 else chr(96 + token) for token in ids)

    monkeypatch.setattr(TextTokenizer, "load_stored", lambda *_, **__: Letters())
    assert pieces_of(shards.train) == [(0, "ab.", 0, 3, 3), (1, "cdef", 0, 4, 6), (1, "g.", 4, 2, 6)]
    assert {piece.domain for row in range(shards.train.rows) for piece in shards.train.pieces(row)} == {"0", "1"}
