"""The durable episodic memory: chunks of text on the disk, found by the cosine of their keys, changed by commits.

The log (episode_log.py) is the only source. Opening it rebuilds the episodes in RAM and the search structure: 50,000
commits of one episode of width 512 take 0.7 s, 0.15 s of it in FAISS. Reading FAISS's structure from a file and
checking it takes 0.3 s, so up to MANY episodes there is no such file. Above MANY an inverted file is trained (17 s for
120,000 episodes) and cached (index_cache.py). Without FAISS every search is exact.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cdrmix.errors import DiskFullError
from cdrmix.reason.memory.episode_log import Commit, EpisodeLog, Floats
from cdrmix.reason.memory.index_cache import IndexCache, Origin
from cdrmix.reason.memory.kept_episodes import Hit, KeptEpisodes, Staged
from cdrmix.reason.memory.vectors import ExactVectors, update

if TYPE_CHECKING:
    from cdrmix.reason.memory.faiss_vectors import FaissVectors

HAS_FAISS = importlib.util.find_spec("faiss") is not None
MANY = 100_000  # episodes above which an inverted file is used: an exact search of 100,000 x 512 takes some 10 ms


class EpisodicIndex:
    """The episodes of one run in `folder`, of at most `max_tokens` tokens together; open in one process at a time.

    Keys are scaled to length 1, so that scores are cosines. A full index evicts the least recently used episodes. No id
    is used twice. The index is a function of its commits, bit for bit, however often it is closed and opened. Searches
    are exact, except with FAISS above MANY episodes: there they read some lists of an inverted file. The order of later
    additions in a list may differ after opening, and with it which of several equal scores is found.
    Raises MemoryLogError if the log cannot be opened (see EpisodeLog).
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
        """The tokens of all episodes."""
        return self._kept.tokens

    @property
    def last_step(self) -> int:
        """The step of the last commit; 0 before the first."""
        return self._kept.last_step

    @property
    def dropped_bytes(self) -> int:
        """The bytes of an incomplete commit that opening the log removed, after a kill or a power cut."""
        return self._log.dropped

    def close(self) -> None:
        """Releases the folder for another process."""
        if self._cached != self._log.sequence:
            self._save()
        self._log.close()

    def search(self, queries: Floats, count: int, step: int) -> list[list[Hit]]:
        """For every query [Q, dim] the at most `count` episodes with the largest cosines, the largest first.

        Episodes that have expired at `step` are not found. Of equal scores the older episode is first.
        """
        return self._kept.search(self._vectors, queries, count, step)

    def commit(self, staged: Staged, step: int) -> list[int]:
        """Makes a step's changes durable, then visible; returns the new episodes' ids.

        Removes expired episodes; then the least recently used ones while there are more than max_tokens tokens, the
        older of two first. Raises ValueError for an episode longer than max_tokens and for a key that is zero or not
        finite, and DiskFullError; then nothing has changed.
        """
        commit = self._kept.commit_of(staged, step)
        if commit is None:
            return []
        self._log.append(commit)
        if self._apply(commit):
            self._vectors = self._make_vectors()
            self._save()
        else:
            update(self._vectors, *self._kept.changes(commit))
        return [episode.id for episode in commit.added]

    def _open(self) -> None:
        self._kept = KeptEpisodes(self.dim, self.max_tokens)
        self._sample: Floats | None = None  # keys on which the inverted file is trained
        self._cached = 0  # the number of commits when the cache was written
        self._log = EpisodeLog(self._folder, self.dim)
        try:
            self._cache = IndexCache(self._folder)
            origin = self._cache.origin()
            matches, next_id = False, 0  # whether the cache belongs to this log; the next id at its commit
            trained = 0  # the number of commits when an inverted file was last trained
            for commit in self._log.commits():
                if self._apply(commit):
                    trained = self._log.sequence
                if origin is not None and self._log.sequence == origin.commits:
                    matches, next_id = origin == self._origin(), self._kept.next_id
            if matches and origin is not None and trained <= origin.commits and self._read(next_id):
                self._cached = origin.commits
            else:
                self._vectors = self._make_vectors()
                self._save()
        except BaseException:
            self._log.close()
            raise

    def _origin(self) -> Origin:
        """The origin of a cache that is written now."""
        return Origin(f"{_faiss_kind()}, {self.dim} wide", self._log.sequence, self._log.digest)

    def _save(self) -> None:
        """Writes the cache if there is an inverted file: only its training takes long."""
        if isinstance(self._vectors, ExactVectors) or self._sample is None:
            return
        try:
            self._cache.save(self._vectors.content(), self._origin())
            self._cached = self._log.sequence
        except DiskFullError:  # the log is complete; an old or missing cache only costs time
            self._cached = self._log.sequence

    def _read(self, next_id: int) -> bool:
        """Reads the search structure from the cache, written when `next_id` was the next id, and updates it.

        Returns False if the cache is missing or damaged.
        """
        content = self._cache.load() if self._sample is not None else None
        if content is None:
            return False
        from cdrmix.reason.memory.faiss_vectors import FaissVectors

        vectors = FaissVectors(self.dim, self._sample, content)
        cached = vectors.ids()
        removed = cached[~np.isin(cached, np.fromiter(self._kept.episodes, np.int64, len(self)))]
        if len(removed):
            vectors.remove(removed)
        later = sorted(id for id in self._kept.episodes if id >= next_id)
        if later:
            vectors.add(np.array(later, np.int64), self._kept.keys(later))
        self._vectors = vectors
        return True

    def _apply(self, commit: Commit) -> bool:
        """Applies a commit to the episodes in RAM. Returns whether a new search structure has to be made."""
        self._kept.apply(commit)
        # The sample depends only on the commits, so an index that was closed and opened has the same lists.
        trained = MANY // 2 if self._sample is None else len(self._sample)
        if len(self._kept.episodes) <= 2 * trained or not HAS_FAISS:
            return False
        self._sample = self._kept.keys(sorted(self._kept.episodes))
        return True

    def _make_vectors(self) -> FaissVectors | ExactVectors:
        """A new search structure of all episodes, the oldest first."""
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
