"""Episodic memory: chunks of text by the direction of their keys, searched exactly, changed by commits alone.

The log (episode_log.py) is the truth. What is in memory, and what is searched (vectors.py), are made of it again
whenever it is opened: 50,000 commits of one episode of width 512 in 0.7 s, of which FAISS takes 0.15 s. Reading
FAISS's structure from a file and checking it takes 0.3 s, so up to MANY episodes there is no such file. Above, where an
inverted file is trained (17 s for 120,000), it is kept (index_cache.py). Without FAISS every search is exact.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cdrmix.errors import DiskFullError
from cdrmix.reason.memory.episode_log import Commit, EpisodeLog, Floats
from cdrmix.reason.memory.index_cache import IndexCache, Origin
from cdrmix.reason.memory.kept_episodes import Hit, KeptEpisodes, Staged, unit
from cdrmix.reason.memory.vectors import ExactVectors

if TYPE_CHECKING:
    from cdrmix.reason.memory.faiss_vectors import FaissVectors

HAS_FAISS = importlib.util.find_spec("faiss") is not None
MANY = 100_000  # episodes above which an inverted file serves: an exact search of 100,000 x 512 takes some 10 ms


class EpisodicIndex:
    """The episodes of one run in `folder`, at most `max_tokens` tokens of them; one process at a time.

    Keys are scaled to length 1, so that scores are cosines. Evicted is what was used the longest time ago. Ids are
    never given twice. Everything follows from the commits: the same ones give the same index, bit for bit, however
    often it was closed in between. Searches are exact, but with FAISS above MANY episodes: there they read some lists
    of an inverted file, in which the order of what was added later, and so which of equal scores is found, may differ.
    Raises MemoryLogError where the log cannot be opened (see EpisodeLog).
    """

    def __init__(self, folder: Path, dim: int, max_tokens: int) -> None:
        self.dim, self.max_tokens, self._folder = dim, max_tokens, folder
        self._open()

    def __len__(self) -> int:
        return len(self._kept.episodes)

    def __contains__(self, id: object) -> bool:
        return id in self._kept.episodes

    @property
    def tokens(self) -> int:
        """Of all episodes."""
        return self._kept.tokens

    @property
    def position(self) -> tuple[int, int]:
        """Commits and bytes of the log."""
        return self._log.sequence, self._log.size

    @property
    def last_step(self) -> int:
        """Of the last commit; 0 before the first."""
        return self._kept.last_step

    @property
    def dropped_bytes(self) -> int:
        """Of a commit that a kill or a power cut had left unfinished when the log was opened."""
        return self._log.dropped

    def close(self) -> None:
        """Gives the folder free for another process."""
        if self._cached != self._log.sequence:
            self._save()
        self._log.close()

    def search(self, queries: Floats, count: int, step: int) -> list[list[Hit]]:
        """For every query [Q, dim] the episodes of the largest cosines with it, at most `count`, the largest first.

        Those that have expired at `step` are not found. Of equal scores the older episode is first.
        """
        assert queries.ndim == 2
        assert queries.shape[1] == self.dim
        if not len(self):
            return [[] for _ in queries]
        hidden = np.array(self._kept.expired(step), np.int64)  # expired, but still there, since no commit came after
        ids, scores = self._vectors.search(unit(queries), min(count, len(self)), hidden)
        return [self._kept.hits(*row) for row in zip(ids.tolist(), scores.tolist(), strict=True)]

    def commit(self, staged: Staged, step: int) -> list[int]:
        """Makes a step's changes durable, then visible; returns the new episodes' ids.

        Expired episodes go, and then, while there are more than max_tokens tokens, those used the longest time ago,
        the older of two first. Raises ValueError, with nothing changed, for an episode that alone is longer or whose
        key is not finite or zero, and DiskFullError.
        """
        commit = self._kept.commit_of(staged, step)
        if commit is None:
            return []
        self._log.append(commit)
        added, kept = commit.added, self._kept.episodes
        had = np.array([id for id in commit.removed if id in kept], np.int64)
        if self._apply(commit):
            self._vectors = self._searchable()
            self._save()
            return [episode.id for episode in added]
        if len(had):
            self._vectors.remove(had)
        staying = [episode for episode in added if episode.id in kept]
        if staying:
            ids = np.array([episode.id for episode in staying], np.int64)
            self._vectors.add(ids, np.stack([episode.key for episode in staying]))
        return [episode.id for episode in added]

    def _open(self) -> None:
        self._kept = KeptEpisodes(self.dim, self.max_tokens)
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
                    fits, next = origin == self._origin(), self._kept.next
            if fits and origin is not None and trained <= origin.commits and self._read(next):
                self._cached = origin.commits
            else:
                self._vectors = self._searchable()
                self._save()
        except BaseException:
            self._log.close()
            raise

    def _origin(self) -> Origin:
        """What a cache that is written now follows from."""
        return Origin(f"{_faiss_kind()}, {self.dim} wide", self._log.sequence, self._log.digest)

    def _save(self) -> None:
        """Writes the cache, where there are lists that took long to make."""
        if isinstance(self._vectors, ExactVectors) or self._sample is None:
            return
        try:
            self._cache.save(self._vectors.content(), self._origin())
            self._cached = self._log.sequence
        except DiskFullError:  # everything is in the log, and an old or a missing cache costs time alone
            self._cached = self._log.sequence

    def _read(self, next: int) -> bool:
        """Takes the search structure from the cache, made when `next` was the next id, and brings it up to date.

        False where there is none after all, or a damaged one.
        """
        content = self._cache.load() if self._sample is not None and HAS_FAISS else None
        if content is None:
            return False
        from cdrmix.reason.memory.faiss_vectors import FaissVectors

        vectors = FaissVectors(self.dim, self._sample, content)
        had = vectors.ids()
        gone = had[~np.isin(had, np.fromiter(self._kept.episodes, np.int64, len(self)))]
        if len(gone):
            vectors.remove(gone)
        later = sorted(id for id in self._kept.episodes if id >= next)
        if later:
            vectors.add(np.array(later, np.int64), self._kept.keys(later))
        self._vectors = vectors
        return True

    def _apply(self, commit: Commit) -> bool:
        """Takes a commit into memory; whether the search structure has to be made anew for it."""
        self._kept.apply(commit)
        # A function of the commits alone, so that an index that was closed in between has the same lists.
        trained = MANY // 2 if self._sample is None else len(self._sample)
        if len(self._kept.episodes) <= 2 * trained or not HAS_FAISS:
            return False
        self._sample = self._kept.keys(sorted(self._kept.episodes))
        return True

    def _searchable(self) -> FaissVectors | ExactVectors:
        """All that is kept, the oldest first."""
        ids = sorted(self._kept.episodes)
        vectors: FaissVectors | ExactVectors
        if HAS_FAISS:
            from cdrmix.reason.memory.faiss_vectors import FaissVectors

            vectors = FaissVectors(self.dim, self._sample)
        else:
            vectors = ExactVectors(self.dim)
        vectors.add(np.array(ids, np.int64), self._kept.keys(ids))
        return vectors


def _faiss_kind() -> str:
    if not HAS_FAISS:
        return "none"
    from cdrmix.reason.memory.faiss_vectors import KIND

    return KIND
