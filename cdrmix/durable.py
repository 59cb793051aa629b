"""Files that are whole or not there: hashes, replacement in one move, and what is said when the disk is full."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from cdrmix.errors import DiskFullError


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's contents, hexadecimal; read in constant memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_file(path: Path) -> None:
    """Brings a file that was written to the disk: what returns from here survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Brings a folder's entries to the disk, so that what was renamed in it stays renamed after a power cut."""
    sync_file(folder)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file (text as UTF-8) in one move: readers see the old contents or the new, never half of them.

    A write that fails leaves the old file and nothing beside it. One writer at a time.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        sync_file(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error means that no more bytes fit; safetensors reports the system's error only as text."""
    if isinstance(error, OSError):
        return isinstance(error, DiskFullError) or error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "No space left on device" in str(error) or "Disk quota exceeded" in str(error)


def disk_full(what: str, remedy: str) -> DiskFullError:
    """The error for `what` (a noun: "a checkpoint under /x") not fitting; `remedy`: whole sentences, what to do."""
    return DiskFullError(f"the disk is full: {what} could not be written. {remedy}")


@contextmanager
def disk_guard(what: str, remedy: str) -> Iterator[None]:
    """Turns a full disk or quota into DiskFullError, worded by `disk_full`; the innermost guard words it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, DiskFullError) or not is_disk_full(error):
            raise
        raise disk_full(what, remedy) from error
