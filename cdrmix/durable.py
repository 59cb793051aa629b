"""Durable files: atomic replacement, checksums, locks, and the error for a full disk."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from cdrmix.errors import ConfigError, DiskFullError

TELL_EVERY = 30.0  # seconds between two lines about a wait for another process
LONGEST_WAIT = 48 * 3600.0  # seconds: the other process may prepare a large text


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file, hexadecimal. The file is read in blocks, so memory is bounded."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lock_file(file: IO[str], used: Callable[[], str]) -> None:
    """Locks an open file against other processes, until it is closed. Raises ConfigError if another one has the lock.

    used: the message of the error; it gets the remedy.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"{used()}; wait until it ends, or stop it") from error


def wait_until(
    done: Callable[[], bool], seconds: float, tell: Callable[[float], None], first: float = math.inf
) -> bool:
    """Waits for something that another process does, at most so long. Returns whether it is done. A signal ends it.

    tell: is called with the seconds so far, every TELL_EVERY seconds; earlier for the first time if `first` is less.
    """
    begun, pause = time.monotonic(), 0.001
    due = begun + min(first, TELL_EVERY)
    while not done():
        now = time.monotonic()
        if now - begun > seconds:
            return False
        if now >= due:
            due = now + TELL_EVERY
            tell(now - begun)
        time.sleep(pause)
        pause = min(1.0, pause * 1.5)
    return True


def wait_for_lock(file: IO[str], waiting: Callable[[], None]) -> None:
    """Locks an open file against other processes, until it is closed.

    waiting: is called if another process has the lock, at once and every TELL_EVERY seconds. Raises ConfigError after
    LONGEST_WAIT seconds.
    """

    def locked() -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    if not wait_until(locked, LONGEST_WAIT, lambda seconds: waiting(), first=0.0):
        raise ConfigError(
            f"{file.name}: another process has had this lock for {LONGEST_WAIT / 3600:.0f} hours; stop it"
        )


@contextmanager
def only_process(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """A context that one process of this machine at a time can enter. `path` is its lock file, which is removed.

    waiting: is called if another process is in it.
    """
    while True:
        with path.open("a") as file:
            wait_for_lock(file, waiting)
            if _is_file_at(file, path):
                yield
                path.unlink(missing_ok=True)  # while it is locked: who waits for it finds that it is gone
                return


def _is_file_at(file: IO[str], path: Path) -> bool:
    """Whether a path still leads to an open file, which another process may have removed or replaced since."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def remove_remains(target: Path) -> None:
    """Removes `.NAME.PROCESS.tmp` beside a target: what killed processes that made it have left.

    What is of running processes is kept.
    """
    for remains in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        process = remains.name.split(".")[-2]
        if process == str(os.getpid()) or not Path(f"/proc/{process}").exists():
            if remains.is_dir():
                shutil.rmtree(remains, ignore_errors=True)
            else:
                remains.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Flushes a written file to the disk (fsync): its contents survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flushes the entries of a folder to the disk (fsync): a rename in it survives a power failure."""
    sync_file(folder)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file (text as UTF-8) atomically: a reader sees either the old or the new contents.

    If the write fails, the old file stays and the temporary file is deleted. Only one process may write at a time.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        sync_file(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


class ChecksummedFile:
    """A file that is written once. `close` flushes it to the disk and returns its size and SHA-256."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._hash = hashlib.sha256()
        self._file = path.open("wb")

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def close(self) -> dict[str, Any]:
        """Flushes and closes the file. Returns {"bytes": size, "sha256": hexadecimal}."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self.size, "sha256": self._hash.hexdigest()}

    def discard(self) -> None:
        """Closes the file, if it is open, without flushing it."""
        with suppress(OSError):  # closing flushes the buffer, which fails again on a full disk
            self._file.close()


def write_checksummed(path: Path, data: bytes) -> dict[str, Any]:
    """Writes a whole file and flushes it to the disk. Returns {"bytes": size, "sha256": hexadecimal}."""
    file = ChecksummedFile(path)
    try:
        file.write(data)
        return file.close()
    finally:
        file.discard()


def free_bytes(folder: Path) -> int | None:
    """The free bytes of the disk on which a folder is or will be; None if the disk does not tell them."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        usage = shutil.disk_usage(existing)
    except OSError:
        return None
    return usage.free if usage.total else None  # some network drives have no size


def folder_bytes(folder: Path) -> int:
    """The bytes of the files in a folder; 0 if it does not exist."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def is_disk_full(error: BaseException) -> bool:
    """Whether an error means that the disk or the quota is full. safetensors gives the system error only as text."""
    if isinstance(error, OSError):
        return isinstance(error, DiskFullError) or error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "No space left on device" in str(error) or "Disk quota exceeded" in str(error)


def disk_full(what: str, remedy: str) -> DiskFullError:
    """The error for a full disk. what: a noun, such as "a checkpoint under /x". remedy: sentences for the user."""
    return DiskFullError(f"the disk is full: {what} could not be written. {remedy}")


@contextmanager
def disk_guard(what: str, remedy: str) -> Iterator[None]:
    """Raises DiskFullError, with the message of `disk_full`, if the disk is full. The innermost guard determines it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, DiskFullError) or not is_disk_full(error):
            raise
        raise disk_full(what, remedy) from error
