"""Files that are brought to the disk and known by their size and SHA-256, as an index names them."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


class HashedFile:
    """A file being written, with the SHA-256 of what went into it; `close` brings it to the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._hash = hashlib.sha256()
        self._file = path.open("wb")

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def close(self) -> dict[str, Any]:
        """The file's entry in the index."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self.size, "sha256": self._hash.hexdigest()}

    def abandon(self) -> None:
        """Let go of the file, if it is open, whatever has become of its contents."""
        with suppress(OSError):  # a full disk fails the flush of what is buffered once more
            self._file.close()


def write_file(path: Path, data: bytes) -> dict[str, Any]:
    """Write a whole file and bring it to the disk; its entry in the index."""
    file = HashedFile(path)
    try:
        file.write(data)
        return file.close()
    finally:
        file.abandon()
