"""Episodic memory: chunks of text by the direction of their keys, searched exactly, changed by commits alone.

The log (episode_log.py) is the truth. What is in memory, and the search structure of FAISS, are made of it again
whenever it is opened: 50,000 episodes of width 512 in less than a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np

from cdrmix.errors import MemoryLogError
from cdrmix.reason.episode_log import NEVER, Commit, Episode, EpisodeLog, Floats, Ids

MANY = 100_000  # episodes from which an inverted index serves: an exact search of so many takes some 10 ms


class Hit(NamedTuple):
    """An episode that a search found, and the inner product of its key with the query."""

    id: int
    score: float
    tokens: Ids


class Staged:
    """What a controller step would change: nothing of it is seen by searches, or kept, before it is committed."""

    def __init__(self) -> None:
        self.read: dict[int, None] = {}
        self.episodes: list[tuple[Floats, Ids, int]] = []

    def use(self, hits: Sequence[Hit]) -> None:
        """These were read: they are the last to be evicted."""
        self.read.update(dict.fromkeys(hit.id for hit in hits))

    def add(self, key: Floats, tokens: Ids, expires: int = NEVER) -> None:
        """An episode to be written. key: float32 [dim], not zero; tokens: uint32 [n]; expires: at which step, if ever."""
        self.episodes.append((np.array(key, np.float32), np.array(tokens, np.uint32), expires))


class _Kept:
    """An episode in memory: its tokens, and the number of the commit that last used it."""

    __slots__ = ("expires", "key", "tokens", "used")

    def __init__(self, episode: Episode, used: int) -> None:
        self.key, self.tokens, self.expires, self.used = episode.key, episode.tokens, episode.expires, used


class EpisodicIndex:
    """The episodes of one run in `folder`, at most `max_tokens` tokens of them; one process at a time.

    Keys are scaled to length 1, so that scores are cosines. Evicted is what was used the longest time ago. Ids are
    never given twice. Everything follows from the commits: the same ones give the same index, however often it was
    closed in between.
    """

    def __init__(self, folder: Path, dim: int, max_tokens: int) -> None:
        self.dim, self.max_tokens = dim, max_tokens
        self.tokens = 0  # of all episodes
        self._log = EpisodeLog(folder, dim)
        self._kept: dict[int, _Kept] = {}
        self._next = 0
        try:
            for commit in self._log.commits():
                self._apply(commit, self._log.sequence)
        except BaseException:
            self._log.close()
            raise
        self._search = _structure(dim, self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def position(self) -> tuple[int, int]:
        """Commits and bytes of the log: what a checkpoint notes, and `rewind` takes."""
        return self._log.sequence, self._log.size

    @property
    def dropped_bytes(self) -> int:
        """Of a commit that was unfinished when the log was last closed, by a kill or a power cut."""
        return self._log.dropped

    def close(self) -> None:
        """Gives the folder free for another process."""
        self._log.close()

    def search(self, queries: Floats, count: int, step: int) -> list[list[Hit]]:
        """For every query [Q, dim], which need not be of length 1, the episodes of the largest cosines, at most `count`.

        Those that have expired at `step` are not found. Of equal scores the older episode is first.
        """
        assert queries.ndim == 2
        assert queries.shape[1] == self.dim
        if not self._kept:
            return [[] for _ in queries]
        expired = [id for id, kept in self._kept.items() if kept.expires != NEVER and kept.expires <= step]
        hidden = faiss.IDSelectorNot(faiss.IDSelectorBatch(np.array(expired, np.int64))) if expired else None
        parameters = faiss.SearchParameters(sel=hidden) if hidden is not None else None
        scores, ids = self._search.search(_unit(queries), min(count, len(self._kept)), params=parameters)
        return [
            [
                Hit(int(id), float(score), self._kept[int(id)].tokens)
                for score, id in sorted(zip(of_query, found, strict=True), key=lambda pair: (-pair[0], pair[1]))
                if id >= 0
            ]
            for of_query, found in zip(scores, ids, strict=True)
        ]

    def commit(self, staged: Staged, step: int) -> list[int]:
        """Makes a step's changes durable, then visible; returns the new episodes' ids.

        Expired episodes go, and then, where there are more than max_tokens tokens, those used the longest time ago,
        the older of two first; an episode that alone is longer is refused: ValueError.
        """
        added = []
        for key, tokens, expires in staged.episodes:
            if len(tokens) > self.max_tokens:
                raise ValueError(
                    f"an episode of {len(tokens)} tokens does not fit reasoning.memory.max_tokens = {self.max_tokens}"
                )
            if key.shape != (self.dim,) or not np.isfinite(key).all() or not key.any():
                raise ValueError(f"a key must be {self.dim} finite numbers, not all of them 0; found {key.shape}")
            added.append(Episode(self._next + len(added), _unit(key[None])[0], tokens, expires))
        read = tuple(id for id in staged.read if id in self._kept)
        removed = self._evicted(read, added, step)
        if not (read or removed or added):
            return []
        commit = Commit(step, read, removed, tuple(added))
        self._log.append(commit)
        gone = np.array([id for id in removed if id in self._kept], np.int64)
        self._apply(commit, self._log.sequence)
        if len(gone):
            self._search.remove_ids(gone)
        staying = [episode for episode in added if episode.id in self._kept]
        if staying:
            ids = np.array([episode.id for episode in staying], np.int64)
            self._search.add_with_ids(np.stack([episode.key for episode in staying]), ids)
        if _wants_inverted(len(self._kept)) and not isinstance(self._search, faiss.IndexIVFFlat):
            self._search = _structure(self.dim, self._kept)
        return [episode.id for episode in added]

    def rewind(self, position: tuple[int, int]) -> None:
        """Goes back to an earlier position, later commits being moved aside: what resuming a run does."""
        if position == self.position:
            return
        folder = self._log.path.parent
        self._log.truncate(*position)
        self._log.close()
        self.__init__(folder, self.dim, self.max_tokens)  # type: ignore[misc]
