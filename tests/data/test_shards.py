"""Shards: what was written is what is read, and what was altered is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from cdrmix.data.shards import FORMAT, SPLITS, ShardSet, SplitWriter, open_shards, token_dtype, write_index
from cdrmix.errors import ShardError


def write(folder: Path, documents: list[list[int]], *, vocab_size: int = 300, shard_tokens: int = 10) -> ShardSet:
    """Shards of token lists, of which both splits get the same; 0 ends each document."""
    folder.mkdir()
    splits, files = {}, {}
    for name in SPLITS:
        writer = SplitWriter(folder, name, vocab_size=vocab_size, shard_tokens=shard_tokens, row_length=4)
        for ids in documents:
            writer.add(np.array([*ids, 0]), len(ids))
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
        for damage in ("alter", "cut", "lengthen", "remove"):
            copy = tmp_path / f"{damage}-{name}"
            shutil.copytree(written, copy)
            file = copy / name
            data = file.read_bytes()
            if damage == "remove":
                file.unlink()
            else:
                altered = bytes([data[0] ^ 1]) + data[1:]
                file.write_bytes({"alter": altered, "cut": data[:-1], "lengthen": data + b"0"}[damage])
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
    with pytest.raises(ShardError, match="cut short"):
        open_shards(shards.path, verify=False)
