"""The files of a folder of shards: reading across them, and index.json, which has their sizes and SHA-256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cdrmix.durable import sha256_file, write_checksummed
from cdrmix.errors import ShardError
from cdrmix.json_text import parse_json


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Writes index.json with a checksum of its contents. It is the last file of a folder of shards."""
    content = {"sha256": _checksum(index), **index}
    write_checksummed(folder / "index.json", json.dumps(content, indent=1).encode("utf-8"))


def read_index(path: Path, version: int, *, verify: bool) -> dict[str, Any]:
    """The index of a folder, after verifying it and the size of every file. verify: their SHA-256 too.

    version: the format that is expected. Raises ShardError with the file, what was expected and what was found.
    """
    index = _read(path, version)
    for name, entry in index["files"].items():
        file = path / name
        if not file.is_file():
            raise ShardError(f"{file} is missing. {_remedy(path)}")
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise ShardError(
                f"{file} has {size} bytes, not {entry['bytes']}: it is truncated or changed. {_remedy(path)}"
            )
        found = sha256_file(file) if verify else entry["sha256"]
        if found != entry["sha256"]:
            raise ShardError(f"{file} is corrupt: its SHA-256 is {found}, not {entry['sha256']}. {_remedy(path)}")
    return index


def read_across(
    files: Sequence[np.ndarray[Any, np.dtype[Any]]], size: int, start: int, stop: int
) -> np.ndarray[Any, np.dtype[Any]]:
    """Items start .. stop - 1 of consecutive files with `size` items each."""
    shard, offset = divmod(start, size)
    parts = [files[shard][offset : offset + stop - start]] if start < stop else [np.zeros(0, np.uint8)]
    while (start := start + len(parts[-1])) < stop:
        shard += 1
        parts.append(files[shard][: stop - start])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _read(path: Path, version: int) -> dict[str, Any]:
    file = path / "index.json"
    try:
        index = parse_json(file.read_bytes())
        expected = index.pop("sha256")
    except OSError as error:
        raise ShardError(f"{path} holds no finished shards: cannot read index.json: {error.strerror}") from error
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise ShardError(f"{file} is corrupt: {error}. {_remedy(path)}") from error
    checksum = _checksum(index)
    if checksum != expected:
        raise ShardError(f"{file} is corrupt: its SHA-256 is {checksum}, not {expected}. {_remedy(path)}")
    if index["format"] != version:
        raise ShardError(f"{file} is of format {index['format']}; this version reads {version}. {_remedy(path)}")
    return dict(index)


def _checksum(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode("utf-8")).hexdigest()


def _remedy(path: Path) -> str:
    return f"Delete the folder {path}; it is then prepared again."
