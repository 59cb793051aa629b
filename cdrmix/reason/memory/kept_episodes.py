"""The episodes of an episodic memory in RAM: eviction, expiry and ids. The durable and the transient memory use it.

A step's changes are staged, turned into a commit, and applied. The episodes are a function of the commits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np

from cdrmix.reason.memory.episode_log import NEVER, Commit, Episode, Floats, Ids
from cdrmix.reason.memory.vectors import ExactVectors, Integers, Vectors, update


class Hit(NamedTuple):
    """A search result: an episode, and the inner product of its key with the query."""

    id: int
    score: float
    tokens: Ids


class Staged:
    """The proposed changes of a controller step. Before their commit no search sees them, and nothing is stored."""

    def __init__(self) -> None:
        self.read: dict[int, None] = {}
        self.episodes: list[tuple[Floats, Ids, int]] = []

    def use(self, hits: Sequence[Hit]) -> None:
        """Records that these episodes were read: a commit makes them the most recently used."""
        self.read.update(dict.fromkeys(hit.id for hit in hits))

    def add(self, key: Floats, tokens: Ids, expires: int = NEVER) -> None:
        """Adds an episode. key: float32 [dim], not zero; tokens: uint32 [n]; expires: its expiry step, or NEVER."""
        self.episodes.append((np.array(key, np.float32), np.array(tokens, np.uint32), expires))


class EpisodicMemory(Protocol):
    """The interface of episodic memories: EpisodicIndex on the disk, DurableMemory with it, EpisodesInMemory in RAM."""

    def __len__(self) -> int:
        """The number of episodes."""

    def __contains__(self, id: object) -> bool:
        """Whether the memory has an episode of this id."""

    def search(self, queries: Floats, count: int, step: int) -> list[list[Hit]]:
        """For every query [Q, dim] the `count` unexpired episodes with the largest cosines, the largest first."""

    def commit(self, staged: Staged, step: int) -> list[int]:
        """Makes a step's changes visible, and durable if the memory is; returns the ids of the new episodes."""


class KeptEpisodes:
    """Episodes with keys of width `dim`, of at most `max_tokens` tokens together."""

    def __init__(self, dim: int, max_tokens: int) -> None:
        self.dim, self.max_tokens = dim, max_tokens
        self.tokens = 0  # of all episodes
        self.next_id = 0
        self.last_step = 0  # of the last commit
        self.episodes: OrderedDict[int, Episode] = OrderedDict()  # the least recently used first
        self._expiring: dict[int, int] = {}  # expiry steps by id, of the episodes that have one

    def commit_of(self, staged: Staged, step: int) -> Commit | None:
        """The commit of a step's changes; None if nothing changes. See EpisodicIndex.commit."""
        added = [self._episode(number, *episode) for number, episode in enumerate(staged.episodes)]
        read = tuple(id for id in staged.read if id in self.episodes)
        removed = self._evicted(read, added, step)
        return Commit(step, read, removed, tuple(added)) if read or removed or added else None

    def apply(self, commit: Commit) -> None:
        """Applies a commit."""
        self.last_step = commit.step
        for id in sorted(commit.read):
            self.episodes.move_to_end(id)
        for episode in commit.added:
            self.episodes[episode.id] = episode
            self.next_id = episode.id + 1
            self.tokens += len(episode.tokens)
            if episode.expires != NEVER:
                self._expiring[episode.id] = episode.expires
        for id in commit.removed:
            self.tokens -= len(self.episodes.pop(id).tokens)
            self._expiring.pop(id, None)

    def expired(self, step: int) -> list[int]:
        """Ids that have expired at `step`, but are not removed yet, because only a commit removes them."""
        return [id for id, expires in self._expiring.items() if expires <= step]

    def keys(self, ids: Sequence[int]) -> Floats:
        """The keys [n, dim] of episodes."""
        return np.stack([self.episodes[id].key for id in ids]) if ids else np.empty((0, self.dim), np.float32)

    def hits(self, ids: Sequence[int], scores: Sequence[float]) -> list[Hit]:
        """The results of a search in its order; ids below 0 mean no result."""
        return [Hit(id, score, self.episodes[id].tokens) for id, score in zip(ids, scores, strict=True) if id >= 0]

    def search(self, vectors: Vectors, queries: Floats, count: int, step: int) -> list[list[Hit]]:
        """See EpisodicMemory; vectors: the keys of all episodes."""
        assert queries.ndim == 2
        assert queries.shape[1] == self.dim
        if not self.episodes:
            return [[] for _ in queries]
        hidden = np.array(self.expired(step), np.int64)
        ids, scores = vectors.search(unit(queries), min(count, len(self.episodes)), hidden)
        return [self.hits(*row) for row in zip(ids.tolist(), scores.tolist(), strict=True)]

    def changes(self, commit: Commit) -> tuple[Integers, list[Episode]]:
        """What an applied commit changes in a search structure: the ids to remove, and the episodes to add.

        A commit can remove an episode that it adds.
        """
        new = {episode.id for episode in commit.added}
        removed = np.array([id for id in commit.removed if id not in new], np.int64)
        return removed, [episode for episode in commit.added if episode.id in self.episodes]

    def _episode(self, number: int, key: Floats, tokens: Ids, expires: int) -> Episode:
        """The staged episode `number`, checked and with its id."""
        if len(tokens) > self.max_tokens:
            raise ValueError(
                f"an episode of {len(tokens)} tokens is too long: reasoning.memory.max_tokens is {self.max_tokens}"
            )
        if key.shape != (self.dim,) or not np.isfinite(key).all() or not key.any():
            raise ValueError(f"an episode's key must be {self.dim} finite numbers, not all 0; found {key}")
        return Episode(self.next_id + number, unit(key[None])[0], tokens, expires)

    def _evicted(self, read: tuple[int, ...], added: list[Episode], step: int) -> tuple[int, ...]:
        """Ids to remove so that `added` fits; some of `added` too if they alone are too many."""
        removed = self.expired(step)
        tokens = self.tokens + sum(len(episode.tokens) for episode in added)
        tokens -= sum(len(self.episodes[id].tokens) for id in removed)
        expired, just_read = set(removed), set(read)
        for episode in chain(
            (episode for id, episode in self.episodes.items() if id not in just_read),
            (self.episodes[id] for id in sorted(just_read)),
            added,
        ):
            if tokens <= self.max_tokens:
                break
            if episode.id not in expired:
                removed.append(episode.id)
                tokens -= len(episode.tokens)
        return tuple(removed)


class EpisodesInMemory:
    """A transient episodic memory, in RAM only: one for every rollout of a batch."""

    def __init__(self, dim: int, max_tokens: int) -> None:
        self._kept = KeptEpisodes(dim, max_tokens)
        self._vectors = ExactVectors(dim)

    def __len__(self) -> int:
        return len(self._kept.episodes)

    def __contains__(self, id: object) -> bool:
        return id in self._kept.episodes

    def search(self, queries: Floats, count: int, step: int) -> list[list[Hit]]:
        """See EpisodicIndex.search; always exact."""
        return self._kept.search(self._vectors, queries, count, step)

    def commit(self, staged: Staged, step: int) -> list[int]:
        """See EpisodicIndex.commit; in RAM only."""
        commit = self._kept.commit_of(staged, step)
        if commit is None:
            return []
        self._kept.apply(commit)
        update(self._vectors, *self._kept.changes(commit))
        return [episode.id for episode in commit.added]


def unit(keys: Floats) -> Floats:
    """Every row scaled to length 1."""
    keys = np.ascontiguousarray(keys, np.float32)
    return keys / np.linalg.norm(keys.astype(np.float64), axis=1, keepdims=True).astype(np.float32)
