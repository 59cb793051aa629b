"""The log of an episodic memory: what was committed, frame behind frame in one file that only grows.

A frame is one commit: whole and checksummed, or not there. Numbers are little-endian.

    file     header, frames
    header   b"cdrmix episodes\n", version u32, width of the keys u32, CRC-32 of these 24 bytes u32
    frame    payload bytes u32, CRC-32 of the payload u32, sequence number u64 from 0, CRC-32 of these 16 bytes u32,
             payload
    payload  step i64; counts of reads, removals and episodes u32 each; ids read, ids removed u64; of the episodes: ids
             u64, expiry steps i64 (NEVER: none), tokens u32 each, their keys float32, their token ids u32

A process that is killed, or a machine that loses power, can leave a frame behind that was never acknowledged: its
bytes stop early, or are not what was written. Such a last frame is moved out of the file, into one beside it, and said
so. Anything else that is wrong is damage to what was acknowledged, and an error.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cdrmix.durable import disk_guard, sync_folder
from cdrmix.errors import MemoryLogError

MAGIC = b"cdrmix episodes\n"
VERSION = 1
HEADER = struct.Struct("<16sII")
FRAME = struct.Struct("<IIQ")
COUNTS = struct.Struct("<qIII")
CHECKSUM = struct.Struct("<I")
NEVER = -1
LARGEST = 1 << 30  # bytes of a payload; a commit is a chunk's episodes, some kilobytes

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ids = np.ndarray[Any, np.dtype[np.uint32]]


class Episode(NamedTuple):
    """A chunk of text that was kept. key: float32 [dim]; tokens: uint32 [n]; expires: the step it ends at, or NEVER."""

    id: int
    key: Floats
    tokens: Ids
    expires: int = NEVER


class Commit(NamedTuple):
    """What one controller step changed: ids it read (which makes them recently used), ids removed, episodes added."""

    step: int
    read: tuple[int, ...]
    removed: tuple[int, ...]
    added: tuple[Episode, ...]


class EpisodeLog:
    """The log in `folder`, open for one process. `commits()` gives what is in it; `append` adds one, durably.

    dim: width of the keys. sequence: commits in it, size: bytes.
    Raises MemoryLogError for a log that is damaged, of another width, or open in another process, and for a commit
    after one that the disk would neither take nor give back.
    """

    def __init__(self, folder: Path, dim: int) -> None:
        self.path, self.dim, self.sequence = folder / "episodes.log", dim, 0
        self.dropped = 0  # bytes of an unfinished commit that was found at the end
        self._frames = hashlib.sha256()  # of the heads of all frames, which have their payloads' checksums
        self._failed = False
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock()
            self.size = os.fstat(self._file).st_size
            if self.size < HEADER.size + CHECKSUM.size:
                self._begin()
            self._check_header()
        except BaseException:
            os.close(self._file)
            raise

    def close(self) -> None:
        """Gives the log free for another process. Closing twice is no error."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def commits(self) -> Iterator[Commit]:
        """Every commit from the first, the unfinished end cut off; once, right after opening."""
        assert self.sequence == 0, "the log is read once, before anything is appended"
        place = HEADER.size + CHECKSUM.size
        with mmap.mmap(self._file, self.size, access=mmap.ACCESS_READ) as content:
            while place < self.size:
                payload = self._payload(content, place)
                if payload is None:
                    break
                commit = self._parse(payload, place)
                self._frames.update(content[place : place + FRAME.size])
                self.sequence += 1
                place += FRAME.size + CHECKSUM.size + len(payload)
                yield commit
        self._cut(place)

    @property
    def digest(self) -> str:
        """SHA-256 of the heads of all commits: two logs that have it in common hold the same."""
        return self._frames.hexdigest()

    def append(self, commit: Commit) -> None:
        """Writes a commit, which is on the disk when this returns. Raises DiskFullError where it does not fit."""
        payload = self._payload_of(commit)
        head = FRAME.pack(len(payload), zlib.crc32(payload), self.sequence)
        frame = head + CHECKSUM.pack(zlib.crc32(head)) + payload
        if self._failed:
            raise MemoryLogError(
                f"{self.path}: the disk failed in an earlier commit, and what is behind byte {self.size} is unknown."
                " See to the disk and open the memory anew"
            )
        remedy = "Free some space; what was committed before is untouched."
        try:
            with disk_guard(f"a commit to {self.path}", remedy):
                written = 0
                while written < len(frame):
                    written += os.pwrite(self._file, frame[written:], self.size + written)
                os.fdatasync(self._file)
        except BaseException:
            self._withdraw()
            raise
        self._frames.update(head)
        self.size += len(frame)
        self.sequence += 1

    def _withdraw(self) -> None:
        """A commit that was not acknowledged: as if it had never been begun, after a power cut too."""
        self._failed = True  # until the disk has taken this
        os.ftruncate(self._file, self.size)
        os.fdatasync(self._file)
        self._failed = False

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise MemoryLogError(
                f"{self.path} is open in another process, and a memory has one writer: wait for that process, or give"
                " this run a folder of its own"
            ) from error

    def _begin(self) -> None:
        """A new log. One that was killed before its header was whole holds nothing yet."""
        head = HEADER.pack(MAGIC, VERSION, self.dim)
        found = os.pread(self._file, self.size, 0)
        if found != (head + CHECKSUM.pack(zlib.crc32(head)))[: self.size]:
            raise MemoryLogError(f"{self.path} is no episode log: it holds {self.size} bytes of something else")
        with disk_guard(f"{self.path}", "Free some space."):
            os.pwrite(self._file, head + CHECKSUM.pack(zlib.crc32(head)), 0)
            os.fsync(self._file)
        sync_folder(self.path.parent)
        self.size = HEADER.size + CHECKSUM.size

    def _check_header(self) -> None:
        head = os.pread(self._file, HEADER.size + CHECKSUM.size, 0)
        magic, version, dim = HEADER.unpack(head[: HEADER.size])
        if magic != MAGIC or CHECKSUM.unpack(head[HEADER.size :])[0] != zlib.crc32(head[: HEADER.size]):
            raise MemoryLogError(f"{self.path} is no episode log, or its first {len(head)} bytes are damaged")
        if version != VERSION:
            raise MemoryLogError(f"{self.path} is of version {version} of the log; this program reads {VERSION}")
        if dim != self.dim:
            raise MemoryLogError(
                f"{self.path} holds keys of width {dim}, but reasoning.memory.dim is {self.dim}: a memory belongs to"
                " the model that wrote it; give this one a folder of its own"
            )

    def _payload(self, content: mmap.mmap, place: int) -> bytes | None:
        """A frame's payload; None where the frame was never finished."""
        start = place + FRAME.size + CHECKSUM.size
        head = content[place : start - CHECKSUM.size]
        if start > self.size:
            return None
        length, checksum, sequence = FRAME.unpack(head)
        if CHECKSUM.unpack(content[start - CHECKSUM.size : start])[0] != zlib.crc32(head):
            if not content[place:].strip(b"\0"):  # the file had grown, but not been written, when the power went
                return None
            raise self._damaged(place, "its header does not have its checksum")
        if sequence != self.sequence or length > LARGEST:
            raise self._damaged(place, f"it says it is commit {sequence} of {length} bytes")
        payload = content[start : start + length]
        if len(payload) < length:
            return None
        if zlib.crc32(payload) != checksum:
            if start + length == self.size:  # the last one: written, but not acknowledged
                return None
            raise self._damaged(place, "its payload does not have its checksum")
        return payload

    def _damaged(self, place: int, what: str) -> MemoryLogError:
        return MemoryLogError(
            f"{self.path} is damaged: commit {self.sequence}, at byte {place} of {self.size}, cannot be read: {what}."
            f" The {self.sequence} commits before it are whole. Put a copy of the file back; or, to go on with those,"
            f" cut it there: truncate -s {place} {self.path}"
        )

    def _cut(self, place: int) -> None:
        """Moves what is behind `place` into a file beside the log: nothing that was written is thrown away."""
        if place >= self.size:
            return
        rest = os.pread(self._file, self.size - place, place)
        beside = self.path.with_name(f"{self.path.name}.cut-at-{place}")
        with disk_guard(f"{beside}", "Free some space; the log is untouched."), beside.open("wb") as file:
            file.write(rest)
            os.fsync(file.fileno())
        os.ftruncate(self._file, place)
        os.fsync(self._file)
        sync_folder(self.path.parent)
        self.dropped, self.size = self.size - place, place

    def _payload_of(self, commit: Commit) -> bytes:
        added = commit.added
        for episode in added:
            assert episode.key.shape == (self.dim,)
        parts = [
            COUNTS.pack(commit.step, len(commit.read), len(commit.removed), len(added)),
            np.array(commit.read, "<u8").tobytes(),
            np.array(commit.removed, "<u8").tobytes(),
            np.array([episode.id for episode in added], "<u8").tobytes(),
            np.array([episode.expires for episode in added], "<i8").tobytes(),
            np.array([len(episode.tokens) for episode in added], "<u4").tobytes(),
            *(episode.key.astype("<f4").tobytes() for episode in added),
            *(episode.tokens.astype("<u4").tobytes() for episode in added),
        ]
        return b"".join(parts)

    def _parse(self, payload: bytes, place: int) -> Commit:
        """What a payload says. Opening a memory of 50,000 commits is this 50,000 times: few calls, few arrays."""
        step, reads, removals, count = COUNTS.unpack_from(payload)
        numbers = _numbers(reads + removals, count)
        here = COUNTS.size + numbers.size
        if len(payload) < here:
            raise self._damaged(place, f"its counts do not fit its {len(payload)} bytes")
        found = numbers.unpack_from(payload, COUNTS.size)
        if not count and len(payload) == here:
            return Commit(step, found[:reads], found[reads:], ())
        ids_at = reads + removals
        expires_at, lengths_at = ids_at + count, ids_at + 2 * count
        lengths = found[lengths_at:]
        if len(payload) != here + 4 * (count * self.dim + sum(lengths)):  # with a right checksum: another program's
            raise self._damaged(place, f"its counts do not fit its {len(payload)} bytes")
        floats = np.frombuffer(payload, "<f4", -1, here)
        words = floats.view("<u4")
        added, key_at, tokens_at = [], 0, count * self.dim
        for number, length in enumerate(lengths):
            key, tokens = floats[key_at : key_at + self.dim], words[tokens_at : tokens_at + length]
            added.append(Episode(found[ids_at + number], key, tokens, found[expires_at + number]))
            key_at += self.dim
            tokens_at += length
        return Commit(step, found[:reads], found[reads:ids_at], tuple(added))


@lru_cache(256)
def _numbers(ids: int, episodes: int) -> struct.Struct:
    """Of a payload: `ids` ids read and removed; then ids, expiry steps and tokens of the episodes."""
    return struct.Struct(f"<{ids + episodes}Q{episodes}q{episodes}I")
