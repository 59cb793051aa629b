"""Files that are whole or not there, and a full disk that is said as one."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path

import pytest
from safetensors import SafetensorError

from cdrmix import durable
from cdrmix.durable import disk_guard, is_disk_full, only_process, sha256_file, write_atomically
from cdrmix.errors import ConfigError, DiskFullError


def test_the_hash_is_of_the_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc" * 100_000)
    assert sha256_file(tmp_path / "a") == hashlib.sha256(b"abc" * 100_000).hexdigest()


def test_a_file_is_replaced_in_one_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_atomically(path, "naïve\n")
    assert path.read_bytes() == "naïve\n".encode()
    write_atomically(path, b"\xff")
    assert path.read_bytes() == b"\xff"
    synced: list[str] = []
    monkeypatch.setattr(durable, "sync_file", lambda path: synced.append(f"{path.name} {(tmp_path / 'a').read_text()}"))
    path.write_text("old")
    write_atomically(path, "new")
    assert synced == ["a.tmp old", f"{tmp_path.name} new"]  # the bytes before the move, the move after it


def test_a_removed_lock_file_lets_nobody_in_beside_another(tmp_path: Path) -> None:
    """One waits while the first removes the file; when a third comes to the new file, the second is inside."""
    lock = tmp_path / "lock"
    waits, inside, leave = threading.Event(), threading.Event(), threading.Event()

    def second() -> None:
        with only_process(lock, waits.set):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=second)
    with only_process(lock, lambda: pytest.fail("nobody else is there")):
        thread.start()
        assert waits.wait(60)
    assert inside.wait(60)
    with only_process(lock, leave.set):
        assert leave.is_set(), "two are inside"
    leave.set()
    thread.join()
    assert not lock.exists()


def test_a_lock_that_is_not_released_is_waited_for_in_lines_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "TELL_EVERY", 0.02)
    monkeypatch.setattr(durable, "LONGEST_WAIT", 0.1)
    told: list[str] = []
    with (
        only_process(tmp_path / "lock", lambda: None),
        pytest.raises(ConfigError, match="has had this lock for 0 hours"),
        only_process(tmp_path / "lock", lambda: told.append("waits")),
    ):
        pytest.fail("two are inside")
    assert 2 <= len(told) <= 5


@pytest.mark.parametrize("fails", ["write_bytes", "fsync"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    write_atomically(tmp_path / "a", "old")
    write_bytes = Path.write_bytes

    def full(where: Path | int, content: bytes = b"") -> None:
        if isinstance(where, Path):
            write_bytes(where, content[:1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path if fails == "write_bytes" else os, fails, full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "a", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    SafetensorError("Error while serializing: I/O error: Disk quota exceeded (os error 122)"),
]


@pytest.mark.parametrize("error", FULL, ids=str)
def test_a_full_disk_is_known_by_its_number_and_by_its_text(error: Exception) -> None:
    assert is_disk_full(error)
    with (
        pytest.raises(DiskFullError, match=r"^the disk is full: x could not be written\. Do y\.$") as caught,
        disk_guard("outer", "No."),
        disk_guard("x", "Do y."),
    ):
        raise error
    assert caught.value.exit_code == 6
    assert is_disk_full(caught.value)


@pytest.mark.parametrize(
    "error",
    [PermissionError(errno.EACCES, "no"), SafetensorError("Error while deserializing header: header too large")],
    ids=str,
)
def test_other_errors_pass(error: Exception) -> None:
    assert not is_disk_full(error)
    with pytest.raises(type(error)), disk_guard("x", "Do y."):
        raise error
