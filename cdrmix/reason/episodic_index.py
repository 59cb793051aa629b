"""Episodic memory: chunks of text by the direction of their keys, searched exactly, changed by commits alone.

The log (episode_log.py) is the truth. What is in memory, and the search structure of FAISS, are made of it again
whenever it is opened: 50,000 commits of one episode of width 512 in 0.7 s, of which FAISS takes 0.15 s. Reading
FAISS's structure from a file and checking it takes 0.3 s, so up to MANY episodes there is no such file. Above, where an
inverted file is trained (17 s for 120,000), it is kept (index_cache.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np

from cdrmix.errors import DiskFullError
from cdrmix.reason.episode_log import NEVER, Commit, Episode, EpisodeLog, Floats, Ids
from cdrmix.reason.index_cache import IndexCache, Origin

MANY = 100_000  # episodes above which an inverted file serves: an exact search of 100,000 x 512 takes some 10 ms
PROBES = 32  # lists that a search of it reads; there are 4 sqrt(n), as FAISS advises, 1,265 of 100,000


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


class EpisodicIndex:
    """The episodes of one run in `folder`, at most `max_tokens` tokens of them; one process at a time.

    Keys are scaled to length 1, so that scores are cosines. Evicted is what was used the longest time ago. Ids are
    never given twice. Everything follows from the commits: the same ones give the same index, bit for bit, however
    often it was closed in between. Searches are exact up to MANY episodes; above, they read PROBES lists of an inverted
    file, in which the order of what was added later, and so which of equal scores is found, may differ.
    Raises MemoryLogError where the log cannot be opened (see EpisodeLog).
    """

    def __init__(self, folder: Path, dim: int, max_tokens: int) -> None:
        self.dim, self.max_tokens, self._folder = dim, max_tokens, folder
        self._open()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def position(self) -> tuple[int, int]:
        """Commits and bytes of the log: what a checkpoint notes, and `rewind` takes."""
        return self._log.sequence, self._log.size

    @property
    def dropped_bytes(self) -> int:
        """Of a commit that a kill or a power cut had left unfinished when the log was opened."""
        return self._log.dropped

    def close(self) -> None:
        """Gives the folder free for another process."""
        if self._sample is not None and self._cached != self._log.sequence:
            self._save()
        self._log.close()

    def search(self, queries: Floats, count: int, step: int) -> list[list[Hit]]:
        """For every query [Q, dim] the episodes of the largest cosines with it, at most `count`, the largest first.

        Those that have expired at `step` are not found. Of equal scores the older episode is first.
        """
        assert queries.ndim == 2
        assert queries.shape[1] == self.dim
        if not self._kept:
            return [[] for _ in queries]
        scores, ids = self._vectors.search(_unit(queries), min(count, len(self._kept)), params=self._parameters(step))
        return [
            [
                Hit(id, score, self._kept[id].tokens)
                for score, id in sorted(zip(of_query, found, strict=True), key=lambda pair: (-pair[0], pair[1]))
                if id >= 0
            ]
            for of_query, found in zip(scores.tolist(), ids.tolist(), strict=True)
        ]

    def commit(self, staged: Staged, step: int) -> list[int]:
        """Makes a step's changes durable, then visible; returns the new episodes' ids.

        Expired episodes go, and then, while there are more than max_tokens tokens, those used the longest time ago,
        the older of two first. Raises ValueError, with nothing changed, for an episode that alone is longer or whose
        key is not finite or zero, and DiskFullError.
        """
        added = [self._episode(number, *episode) for number, episode in enumerate(staged.episodes)]
        read = tuple(id for id in staged.read if id in self._kept)
        removed = self._evicted(read, added, step)
        if not (read or removed or added):
            return []
        commit = Commit(step, read, removed, tuple(added))
        self._log.append(commit)
        had = np.array([id for id in removed if id in self._kept], np.int64)
        if self._apply(commit):
            self._vectors = self._searchable()
            self._save()
            return [episode.id for episode in added]
        if len(had):
            self._vectors.remove_ids(had)
        staying = [episode for episode in added if episode.id in self._kept]
        if staying:
            ids = np.array([episode.id for episode in staying], np.int64)
            self._vectors.add_with_ids(np.stack([episode.key for episode in staying]), ids)
        return [episode.id for episode in added]

    def rewind(self, position: tuple[int, int]) -> None:
        """Goes back to an earlier position, later commits being moved aside: what resuming a run does.

        Raises MemoryLogError where the log does not have that position.
        """
        if position != self.position:
            self._log.truncate(*position)
            self._log.close()
            self._open()

    def _open(self) -> None:
        self.tokens = 0  # of all episodes
        self._next = 0
        self._kept: OrderedDict[int, Episode] = OrderedDict()  # what was used the longest time ago first
        self._expiring: dict[int, int] = {}  # of those that ever expire, the step
        self._sample: Floats | None = None  # keys that an inverted file's lists are made for
        self._cached = 0  # commits when the cache was written
        self._log = EpisodeLog(self._folder, self.dim)
        try:
            self._cache = IndexCache(self._folder)
            origin = self._cache.origin()
            fits, next, trained = False, 0, 0  # the cache, to the log; the next id then; commits when lists were made
            for commit in self._log.commits():
                if self._apply(commit):
                    trained = self._log.sequence
                if origin is not None and self._log.sequence == origin.commits:
                    fits, next = origin == self._origin(), self._next
            if fits and origin is not None and trained <= origin.commits and self._read(next):
                self._cached = origin.commits
            else:
                self._vectors = self._searchable()
                if self._sample is not None:
                    self._save()
        except BaseException:
            self._log.close()
            raise

    def _origin(self) -> Origin:
        """What a cache that is written now follows from."""
        return Origin(f"faiss {faiss.__version__}, {self.dim} wide", self._log.sequence, self._log.digest)

    def _save(self) -> None:
        try:
            self._cache.save(faiss.serialize_index(self._vectors).tobytes(), self._origin())
            self._cached = self._log.sequence
        except DiskFullError:  # everything is in the log, and an old or a missing cache costs time alone
            self._cached = self._log.sequence

    def _read(self, next: int) -> bool:
        """Takes the search structure from the cache, made when `next` was the next id, and brings it up to date.

        False where there is none after all, or a damaged one.
        """
        content = self._cache.load() if self._sample is not None else None
        if content is None:
            return False
        vectors: Any = faiss.deserialize_index(np.frombuffer(content, np.uint8))
        lists = vectors.invlists
        had = np.concatenate([faiss.rev_swig_ptr(lists.get_ids(n), lists.list_size(n)) for n in range(vectors.nlist)])
        gone = had[~np.isin(had, np.fromiter(self._kept, np.int64, len(self._kept)))]
        if len(gone):
            vectors.remove_ids(gone)
        later = sorted(id for id in self._kept if id >= next)
        if later:
            vectors.add_with_ids(self._keys(later), np.array(later, np.int64))
        self._vectors = vectors
        return True

    def _episode(self, number: int, key: Floats, tokens: Ids, expires: int) -> Episode:
        """What was staged, checked, with its id."""
        if len(tokens) > self.max_tokens:
            raise ValueError(f"an episode of {len(tokens)} tokens: reasoning.memory.max_tokens is {self.max_tokens}")
        if key.shape != (self.dim,) or not np.isfinite(key).all() or not key.any():
            raise ValueError(f"an episode's key must be {self.dim} finite numbers, not all 0; found {key}")
        return Episode(self._next + number, _unit(key[None])[0], tokens, expires)

    def _evicted(self, read: tuple[int, ...], added: list[Episode], step: int) -> tuple[int, ...]:
        """Ids of what has to go for `added` to come, among them too where they alone are too many."""
        removed = [id for id, expires in self._expiring.items() if expires <= step]
        tokens = self.tokens + sum(len(episode.tokens) for episode in added)
        tokens -= sum(len(self._kept[id].tokens) for id in removed)
        gone, now = set(removed), set(read)
        for episode in chain(
            (episode for id, episode in self._kept.items() if id not in now),
            (self._kept[id] for id in sorted(now)),
            added,
        ):
            if tokens <= self.max_tokens:
                break
            if episode.id not in gone:
                removed.append(episode.id)
                tokens -= len(episode.tokens)
        return tuple(removed)

    def _apply(self, commit: Commit) -> bool:
        """Takes a commit into memory; whether the search structure has to be made anew for it."""
        for id in sorted(commit.read):
            self._kept.move_to_end(id)
        for episode in commit.added:
            self._kept[episode.id] = episode
            self._next = episode.id + 1
            self.tokens += len(episode.tokens)
            if episode.expires != NEVER:
                self._expiring[episode.id] = episode.expires
        for id in commit.removed:
            self.tokens -= len(self._kept.pop(id).tokens)
            self._expiring.pop(id, None)
        # A function of the commits alone, so that an index that was closed in between has the same lists.
        trained = MANY // 2 if self._sample is None else len(self._sample)
        if len(self._kept) <= 2 * trained:
            return False
        self._sample = self._keys(sorted(self._kept))
        return True

    def _searchable(self) -> Any:
        """FAISS's structure of all that is kept, the oldest first."""
        ids = sorted(self._kept)
        vectors: Any  # FAISS's stubs know neither its parameters' arguments nor what indices have in common
        if self._sample is None:
            vectors = faiss.IndexIDMap2(faiss.IndexFlatIP(self.dim))
        else:
            lists = round(4 * len(self._sample) ** 0.5)
            vectors = faiss.IndexIVFFlat(faiss.IndexFlatIP(self.dim), self.dim, lists, faiss.METRIC_INNER_PRODUCT)
            vectors.train(self._sample)  # k-means from a fixed seed
        vectors.add_with_ids(self._keys(ids), np.array(ids, np.int64))
        return vectors

    def _keys(self, ids: list[int]) -> Floats:
        return np.stack([self._kept[id].key for id in ids]) if ids else np.empty((0, self.dim), np.float32)

    def _parameters(self, step: int) -> Any:
        """How to search: without what has expired but is still there, since no commit came after."""
        expired = [id for id, expires in self._expiring.items() if expires <= step]
        hidden = faiss.IDSelectorNot(faiss.IDSelectorBatch(np.array(expired, np.int64))) if expired else None
        exact: Any = faiss.SearchParameters
        inverted: Any = faiss.SearchParametersIVF
        if self._sample is not None:
            return inverted(nprobe=PROBES, sel=hidden)
        return exact(sel=hidden) if hidden is not None else None


def _unit(keys: Floats) -> Floats:
    """Every row scaled to length 1."""
    keys = np.ascontiguousarray(keys, np.float32)
    return keys / np.linalg.norm(keys.astype(np.float64), axis=1, keepdims=True).astype(np.float32)
