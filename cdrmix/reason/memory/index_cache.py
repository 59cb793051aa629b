"""A file beside an episodic memory's log that can be made of it again, but not fast: kept only if it is as written.

    episodes.cache       what the caller wants kept, as bytes
    episodes.cache.json  its manifest: SHA-256 and length of those bytes, and which log they follow from

Both are replaced in one move each, the manifest last: killed in between, or damaged later, the two do not fit, and the
cache is as if it were not there.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from cdrmix.durable import disk_guard, write_atomically

VERSION = 1


class Origin(NamedTuple):
    """What a cache follows from: `kind`, which library and structure; the log's first `commits`, by their digest."""

    kind: str
    commits: int
    digest: str


class IndexCache:
    """The cache in `folder`; the caller holds the log's lock, so that there is one writer."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "episodes.cache"
        self._manifest = folder / "episodes.cache.json"
        for path in (self.path, self._manifest):
            path.with_name(path.name + ".tmp").unlink(missing_ok=True)  # of a writer that was killed

    def origin(self) -> Origin | None:
        """What the manifest says the cache follows from; None where there is no readable one."""
        manifest = self._read()
        return None if manifest is None else Origin(manifest["kind"], manifest["commits"], manifest["digest"])

    def load(self) -> bytes | None:
        """The bytes; None where they are not the manifest's."""
        manifest = self._read()
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        if manifest is None or len(content) != manifest["bytes"]:
            return None
        return content if hashlib.sha256(content).hexdigest() == manifest["sha256"] else None

    def save(self, content: bytes, origin: Origin) -> None:
        """Replaces the cache. Raises DiskFullError, with no cache or the old one left."""
        manifest = {
            "version": VERSION,
            **origin._asdict(),
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        with disk_guard(f"{self.path}", "Free some space; it can be made again of the log beside it."):
            write_atomically(self.path, content)
            write_atomically(self._manifest, json.dumps(manifest, indent=1) + "\n")

    def remove(self) -> None:
        """Afterwards there is none."""
        self._manifest.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any] | None:
        try:
            manifest = json.loads(self._manifest.read_bytes())
        except (FileNotFoundError, ValueError):  # ValueError: neither JSON nor UTF-8
            return None
        kinds = {"version": int, "kind": str, "commits": int, "digest": str, "bytes": int, "sha256": str}
        if not isinstance(manifest, dict) or {name: type(value) for name, value in manifest.items()} != kinds:
            return None
        return manifest if manifest["version"] == VERSION else None
