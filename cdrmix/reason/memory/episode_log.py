"""The log of an episodic memory: an append-only file of commits, one checksummed frame each.

A commit is in the log completely or not at all. Numbers are little-endian.

    file     header, frames
    header   b"cdrmix episodes\n", version u32, width of the keys u32, CRC-32 of these 24 bytes u32
    frame    payload bytes u32, CRC-32 of the payload u32, sequence number u64 from 0, CRC-32 of these 16 bytes u32,
             payload
    payload  step i64; counts of reads, removals and episodes u32 each; ids read, ids removed u64; of the episodes: ids
             u64, expiry steps i64 (NEVER: none), tokens u32 each, their keys float32, their token ids u32

After a kill or a power cut the last frame may be incomplete or have wrong bytes. `append` never returned for such a
frame: it is moved to a separate file in the same folder, and its size is reported. Any other wrong byte is damage to
an acknowledged commit, and an error.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cdrmix.durable import disk_guard, sync_folder
from cdrmix.errors import MemoryLogError

LOG = "episodes.log"
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
    """A stored chunk of text. key: float32 [dim]; tokens: uint32 [n]; expires: its expiry step, or NEVER."""

    id: int
    key: Floats
    tokens: Ids
    expires: int = NEVER


class Commit(NamedTuple):
    """The changes of one controller step: ids read (they become the most recently used), ids removed, new episodes."""

    step: int
    read: tuple[int, ...]
    removed: tuple[int, ...]
    added: tuple[Episode, ...]


class EpisodeLog:
    """The log in `folder`, open for one process. `commits()` iterates over its commits; `append` adds one durably.

    dim: width of the keys. sequence: number of commits. size: bytes. dropped: bytes of the incomplete commit that was
    removed from the end. Raises MemoryLogError for a log that is damaged, has another width or is open in another
    process, and for every commit after one that failed on the disk and could not be undone.
    """

    def __init__(self, folder: Path, dim: int) -> None:
        self.path, self.dim, self.sequence = folder / LOG, dim, 0
        self.dropped = 0
        self._frames = hashlib.sha256()  # of the headers of all frames, which contain their payloads' checksums
        self._failed = False
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        self._release = weakref.finalize(self, os.close, self._file)  # also of a log that nobody closes
        try:
            self._lock()
            self.size = os.fstat(self._file).st_size
            if self.size < HEADER.size + CHECKSUM.size:
                self._begin()
            self._check_header()
        except BaseException:
            self._release()
            raise

    def close(self) -> None:
        """Releases the log for another process. Closing twice is no error."""
        self._release()
        self._file = -1

    def commits(self) -> Iterator[Commit]:
        """All commits in their order. Removes an incomplete last one. Call it once, directly after opening."""
        assert self.sequence == 0, "the log is read once, before anything is appended"
        offset = HEADER.size + CHECKSUM.size
        with mmap.mmap(self._file, self.size, access=mmap.ACCESS_READ) as content:
            while offset < self.size:
                payload = self._payload(content, offset)
                if payload is None:
                    break
                commit = self._parse(payload, offset)
                self._frames.update(content[offset : offset + FRAME.size])
                self.sequence += 1
                offset += FRAME.size + CHECKSUM.size + len(payload)
                yield commit
        self._cut(offset)

    @property
    def digest(self) -> str:
        """SHA-256 of the headers of all frames: logs with equal digests have equal commits."""
        return self._frames.hexdigest()

    def append(self, commit: Commit) -> None:
        """Writes a commit; it is on the disk when this returns. Raises DiskFullError if it does not fit."""
        payload = self._payload_of(commit)
        header = FRAME.pack(len(payload), zlib.crc32(payload), self.sequence)
        frame = header + CHECKSUM.pack(zlib.crc32(header)) + payload
        if self._failed:
            raise MemoryLogError(
                f"{self.path}: the disk failed in an earlier commit, and the bytes from {self.size} on are unknown."
                " Repair the disk and open the memory again"
            )
        remedy = "Free some space; earlier commits are unchanged."
        try:
            with disk_guard(f"a commit to {self.path}", remedy):
                written = 0
                while written < len(frame):
                    written += os.pwrite(self._file, frame[written:], self.size + written)
                os.fdatasync(self._file)
        except BaseException:
            self._undo()
            raise
        self._frames.update(header)
        self.size += len(frame)
        self.sequence += 1

    def _undo(self) -> None:
        """Durably removes the bytes of a commit that failed."""
        self._failed = True  # until the disk confirms the removal
        os.ftruncate(self._file, self.size)
        os.fdatasync(self._file)
        self._failed = False

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise MemoryLogError(
                f"{self.path} is open in another process, and a memory can have only one writer: wait for that process,"
                " or name another folder"
            ) from error

    def _begin(self) -> None:
        """Writes the header of a new log, or of one whose process was killed before its header was complete."""
        fields = HEADER.pack(MAGIC, VERSION, self.dim)
        header = fields + CHECKSUM.pack(zlib.crc32(fields))
        if os.pread(self._file, self.size, 0) != header[: self.size]:
            raise MemoryLogError(f"{self.path} is no episode log: its {self.size} bytes are not the start of a header")
        with disk_guard(f"{self.path}", "Free some space."):
            os.pwrite(self._file, header, 0)
            os.fsync(self._file)
        sync_folder(self.path.parent)
        self.size = HEADER.size + CHECKSUM.size

    def _check_header(self) -> None:
        header = os.pread(self._file, HEADER.size + CHECKSUM.size, 0)
        magic, version, dim = HEADER.unpack(header[: HEADER.size])
        if magic != MAGIC or CHECKSUM.unpack(header[HEADER.size :])[0] != zlib.crc32(header[: HEADER.size]):
            raise MemoryLogError(f"{self.path} is no episode log, or its first {len(header)} bytes are damaged")
        if version != VERSION:
            raise MemoryLogError(f"{self.path} has version {version} of the format; this program reads {VERSION}")
        if dim != self.dim:
            raise MemoryLogError(
                f"{self.path} has keys of width {dim}, but reasoning.memory.dim is {self.dim}: a memory belongs to"
                " the model that wrote it; name another folder for this model"
            )

    def _payload(self, content: mmap.mmap, offset: int) -> bytes | None:
        """The payload of the frame at `offset`; None for an incomplete last frame."""
        start = offset + FRAME.size + CHECKSUM.size
        header = content[offset : start - CHECKSUM.size]
        if start > self.size:
            return None
        length, checksum, sequence = FRAME.unpack(header)
        if CHECKSUM.unpack(content[start - CHECKSUM.size : start])[0] != zlib.crc32(header):
            if not content[offset:].strip(b"\0"):  # at a power cut the file had its new length, but not its new bytes
                return None
            raise self._damaged(offset, "the checksum of its header is wrong")
        if sequence != self.sequence or length > LARGEST:
            raise self._damaged(offset, f"its header has the number {sequence} and {length} bytes")
        payload = content[start : start + length]
        if len(payload) < length:
            return None
        if zlib.crc32(payload) != checksum:
            if start + length == self.size:  # the last commit: written, but not acknowledged
                return None
            raise self._damaged(offset, "the checksum of its payload is wrong")
        return payload

    def _damaged(self, offset: int, reason: str) -> MemoryLogError:
        return MemoryLogError(
            f"{self.path} is damaged: commit {self.sequence}, at byte {offset} of {self.size}, cannot be read:"
            f" {reason}. The {self.sequence} commits before it are intact. Restore the file from a backup; or keep only"
            f" those commits: truncate -s {offset} {self.path}"
        )

    def _cut(self, offset: int) -> None:
        """Moves the bytes from `offset` on to another file in the same folder: no written byte is lost."""
        if offset >= self.size:
            return
        rest = os.pread(self._file, self.size - offset, offset)
        path = self.path.with_name(f"{self.path.name}.cut-at-{offset}")
        with disk_guard(f"{path}", "Free some space; the log is unchanged."), path.open("wb") as file:
            file.write(rest)
            os.fsync(file.fileno())
        os.ftruncate(self._file, offset)
        os.fsync(self._file)
        sync_folder(self.path.parent)
        self.dropped, self.size = self.size - offset, offset

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

    def _parse(self, payload: bytes, offset: int) -> Commit:
        """The commit of a payload. Opening a memory calls this for every commit, so it makes few calls and arrays."""
        step, reads, removals, count = COUNTS.unpack_from(payload)
        integers = _integers(reads + removals, count)
        arrays_at = COUNTS.size + integers.size
        if len(payload) < arrays_at:
            raise self._damaged(offset, f"its counts do not fit its {len(payload)} bytes")
        values = integers.unpack_from(payload, COUNTS.size)
        if not count and len(payload) == arrays_at:
            return Commit(step, values[:reads], values[reads:], ())
        ids_at = reads + removals
        expires_at, lengths_at = ids_at + count, ids_at + 2 * count
        lengths = values[lengths_at:]
        if len(payload) != arrays_at + 4 * (count * self.dim + sum(lengths)):  # another program wrote it
            raise self._damaged(offset, f"its counts do not fit its {len(payload)} bytes")
        all_keys = np.frombuffer(payload, "<f4", -1, arrays_at)
        all_tokens = all_keys.view("<u4")
        added, key_at, tokens_at = [], 0, count * self.dim
        for number, length in enumerate(lengths):
            key, tokens = all_keys[key_at : key_at + self.dim], all_tokens[tokens_at : tokens_at + length]
            added.append(Episode(values[ids_at + number], key, tokens, values[expires_at + number]))
            key_at += self.dim
            tokens_at += length
        return Commit(step, values[:reads], values[reads:ids_at], tuple(added))


@lru_cache(256)
def _integers(ids: int, episodes: int) -> struct.Struct:
    """The integers of a payload: `ids` ids read and removed; then ids, expiry steps and lengths of the episodes."""
    return struct.Struct(f"<{ids + episodes}Q{episodes}q{episodes}I")
