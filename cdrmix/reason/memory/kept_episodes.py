"""What an episodic memory holds, wherever it is kept: who goes when it is full, what expires, no id used twice.

A step's changes are staged, made a commit of, and applied; the same commits give the same episodes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np

from cdrmix.reason.memory.episode_log import NEVER, Commit, Episode, Floats, Ids


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
        """An episode to write. key: float32 [dim], not zero; tokens: uint32 [n]; expires: at which step, if ever."""
        self.episodes.append((np.array(key, np.float32), np.array(tokens, np.uint32), expires))


class EpisodicMemory(Protocol):
    """The face of an episodic memory: EpisodicIndex on the disk, EpisodesInMemory for rollouts."""

    def __len__(self) -> int:
        """How many episodes there are."""

    def __contains__(self, id: object) -> bool:
        """Whether an episode is still there."""

    def search(self, queries: Floats, count: int, step: int) -> list[list[Hit]]:
        """For every query [Q, dim] the `count` episodes of the largest cosines, largest first, none that expired."""

    def commit(self, staged: Staged, step: int) -> list[int]:
        """Makes a step's changes visible, and durable where this is; ids of the new episodes."""


class KeptEpisodes:
    """Episodes with keys of width `dim`, at most `max_tokens` tokens of them."""

    def __init__(self, dim: int, max_tokens: int) -> None:
        self.dim, self.max_tokens = dim, max_tokens
        self.tokens = 0  # of all episodes
        self.next = 0
        self.last_step = 0  # of the last commit
        self.episodes: OrderedDict[int, Episode] = OrderedDict()  # what was used the longest time ago first
        self._expiring: dict[int, int] = {}  # of those that ever expire, the step

    def commit_of(self, staged: Staged, step: int) -> Commit | None:
        """What applying makes of a step's changes; None where that is nothing. See EpisodicIndex.commit."""
        added = [self._episode(number, *episode) for number, episode in enumerate(staged.episodes)]
        read = tuple(id for id in staged.read if id in self.episodes)
        removed = self._evicted(read, added, step)
        return Commit(step, read, removed, tuple(added)) if read or removed or added else None

    def apply(self, commit: Commit) -> None:
        """Takes a commit in."""
        self.last_step = commit.step
        for id in sorted(commit.read):
            self.episodes.move_to_end(id)
        for episode in commit.added:
            self.episodes[episode.id] = episode
            self.next = episode.id + 1
            self.tokens += len(episode.tokens)
            if episode.expires != NEVER:
                self._expiring[episode.id] = episode.expires
        for id in commit.removed:
            self.tokens -= len(self.episodes.pop(id).tokens)
            self._expiring.pop(id, None)

    def expired(self, step: int) -> list[int]:
        """What is not to be found at `step`, but still there, since no commit came after it expired."""
        return [id for id, expires in self._expiring.items() if expires <= step]

    def keys(self, ids: Sequence[int]) -> Floats:
        """[n, dim], of these episodes."""
        return np.stack([self.episodes[id].key for id in ids]) if ids else np.empty((0, self.dim), np.float32)

    def hits(self, ids: Sequence[int], scores: Sequence[float]) -> list[Hit]:
        """Of what a search found; ids below 0 stand for nothing."""
        found = sorted((-score, id) for id, score in zip(ids, scores, strict=True) if id >= 0)
        return [Hit(id, -score, self.episodes[id].tokens) for score, id in found]

    def _episode(self, number: int, key: Floats, tokens: Ids, expires: int) -> Episode:
        """What was staged, checked, with its id."""
        if len(tokens) > self.max_tokens:
            raise ValueError(f"an episode of {len(tokens)} tokens: reasoning.memory.max_tokens is {self.max_tokens}")
        if key.shape != (self.dim,) or not np.isfinite(key).all() or not key.any():
            raise ValueError(f"an episode's key must be {self.dim} finite numbers, not all 0; found {key}")
        return Episode(self.next + number, unit(key[None])[0], tokens, expires)

    def _evicted(self, read: tuple[int, ...], added: list[Episode], step: int) -> tuple[int, ...]:
        """Ids of what has to go for `added` to come, among them too where they alone are too many."""
        removed = self.expired(step)
        tokens = self.tokens + sum(len(episode.tokens) for episode in added)
        tokens -= sum(len(self.episodes[id].tokens) for id in removed)
        gone, now = set(removed), set(read)
        for episode in chain(
            (episode for id, episode in self.episodes.items() if id not in now),
            (self.episodes[id] for id in sorted(now)),
            added,
        ):
            if tokens <= self.max_tokens:
                break
            if episode.id not in gone:
                removed.append(episode.id)
                tokens -= len(episode.tokens)
        return tuple(removed)


class EpisodesInMemory:
    """An episodic memory of which nothing outlives the process: one for every rollout of a batch."""

    def __init__(self, dim: int, max_tokens: int) -> None:
        self._kept = KeptEpisodes(dim, max_tokens)
        self._ids: list[int] = []
        self._keys = self._kept.keys([])

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, id: object) -> bool:
        return id in self._kept.episodes

    def search(self, queries: Floats, count: int, step: int) -> list[list[Hit]]:
        """As EpisodicIndex's: exact, of equal scores the older episode first."""
        assert queries.ndim == 2
        assert queries.shape[1] == self._kept.dim
        if not self._ids:
            return [[] for _ in queries]
        # each by itself: a product of matrices may round equal keys differently, by where they stand
        scores = (unit(queries)[:, None] * self._keys).sum(-1)
        expired = self._kept.expired(step)
        if expired:
            scores[:, np.isin(self._ids, expired)] = -np.inf
        best = np.argsort(-scores, axis=1, kind="stable")[:, : min(count, len(self._ids) - len(expired))]
        found = np.take_along_axis(scores, best, 1).tolist()
        return [
            self._kept.hits([self._ids[place] for place in row], of_row)
            for row, of_row in zip(best.tolist(), found, strict=True)
        ]

    def commit(self, staged: Staged, step: int) -> list[int]:
        """As EpisodicIndex's, but gone with the process."""
        commit = self._kept.commit_of(staged, step)
        if commit is None:
            return []
        self._kept.apply(commit)
        if commit.added or commit.removed:
            self._ids = sorted(self._kept.episodes)
            self._keys = self._kept.keys(self._ids)
        return [episode.id for episode in commit.added]


def unit(keys: Floats) -> Floats:
    """Every row scaled to length 1."""
    keys = np.ascontiguousarray(keys, np.float32)
    return keys / np.linalg.norm(keys.astype(np.float64), axis=1, keepdims=True).astype(np.float32)
