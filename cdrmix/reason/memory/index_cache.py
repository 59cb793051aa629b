"""The cache of an episodic memory's search structure: a file that the log can rebuild, but slowly.

    episodes.cache       the bytes of the structure
    episodes.cache.json  its manifest: SHA-256 and length of those bytes, and the log that they were made from

Each is replaced atomically, the manifest last. After a kill between the two, or later damage, they do not match, and
the cache is ignored.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from cdrmix.durable import disk_guard, write_atomically
from cdrmix.json_text import parse_json

VERSION = 1


class Origin(NamedTuple):
    """What a cache was made from. kind: library and structure. commits: the log's first commits; digest: of them."""

    kind: str
    commits: int
    digest: str


class IndexCache:
    """The cache in `folder`; the caller holds the log's lock, so that there is one writer."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "episodes.cache"
        self._manifest = folder / "episodes.cache.json"
        for path in (self.path, self._manifest):
            path.with_name(path.name + ".tmp").unlink(missing_ok=True)  # left by a process that was killed

    def origin(self) -> Origin | None:
        """The origin in the manifest; None if there is no readable manifest."""
        manifest = self._read()
        return None if manifest is None else Origin(manifest["kind"], manifest["commits"], manifest["digest"])

    def load(self) -> bytes | None:
        """The cached bytes; None if they do not match the manifest."""
        manifest = self._read()
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        if manifest is None or len(content) != manifest["bytes"]:
            return None
        return content if hashlib.sha256(content).hexdigest() == manifest["sha256"] else None

    def save(self, content: bytes, origin: Origin) -> None:
        """Replaces the cache. Raises DiskFullError; then there is the old cache or none."""
        manifest = {
            "version": VERSION,
            **origin._asdict(),
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        with disk_guard(f"{self.path}", "Free some space; the log can rebuild this file."):
            write_atomically(self.path, content)
            write_atomically(self._manifest, json.dumps(manifest, indent=1) + "\n")

    def _read(self) -> dict[str, Any] | None:
        try:
            manifest = parse_json(self._manifest.read_bytes())
        except (FileNotFoundError, ValueError):  # ValueError: neither JSON nor UTF-8
            return None
        kinds = {"version": int, "kind": str, "commits": int, "digest": str, "bytes": int, "sha256": str}
        if not isinstance(manifest, dict) or {name: type(value) for name, value in manifest.items()} != kinds:
            return None
        return manifest if manifest["version"] == VERSION else None
