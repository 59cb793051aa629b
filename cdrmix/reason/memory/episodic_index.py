"""Episodic memory: chunks of text by the direction of their keys, searched exactly, changed by commits alone.

The log (episode_log.py) is the truth. What is in memory, and the search structure of FAISS, are made of it again
whenever it is opened: 50,000 commits of one episode of width 512 in 0.7 s, of which FAISS takes 0.15 s. Reading
FAISS's structure from a file and checking it takes 0.3 s, so up to MANY episodes there is no such file. Above, where an
inverted file is trained (17 s for 120,000), it is kept (index_cache.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faiss
import numpy as np

from cdrmix.errors import DiskFullError
from cdrmix.reason.memory.episode_log import Commit, EpisodeLog, Floats
from cdrmix.reason.memory.index_cache import IndexCache, Origin
from cdrmix.reason.memory.kept_episodes import Hit, KeptEpisodes, Staged, unit

MANY = 100_000  # episodes above which an inverted file serves: an exact search of 100,000 x 512 takes some 10 ms
PROBES = 32  # lists that a search of it reads; there are 4 sqrt(n), as FAISS advises, 1,265 of 100,000


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
        return len(self._kept.episodes)

    def __contains__(self, id: object) -> bool:
        return id in self._kept.episodes

    @property
    def tokens(self) -> int:
        """Of all episodes."""
        return self._kept.tokens

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
        wanted, keys, parameters = min(count + 1, len(self)), unit(queries), self._parameters(step)
        while True:
            scores, ids = self._vectors.search(keys, wanted, params=parameters)
            found = list(zip(ids.tolist(), scores.tolist(), strict=True))
            # Of equal scores FAISS keeps the later: where the last one to be given equals the first one not to be, all
            # that equal it are needed.
            tied = wanted > count and any(of[count - 1] == of[-1] and row[-1] >= 0 for row, of in found)
            if not tied or wanted == len(self):
                break
            wanted = min(2 * wanted, len(self))
        return [self._kept.hits(*row)[:count] for row in found]

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
            self._vectors.remove_ids(had)
        staying = [episode for episode in added if episode.id in kept]
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
        return Origin(f"faiss {faiss.__version__}, {self.dim} wide", self._log.sequence, self._log.digest)

    def _save(self) -> None:
        """Writes the cache, where there are lists that took long to make."""
        if self._sample is None:
            return
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
        gone = had[~np.isin(had, np.fromiter(self._kept.episodes, np.int64, len(self)))]
        if len(gone):
            vectors.remove_ids(gone)
        later = sorted(id for id in self._kept.episodes if id >= next)
        if later:
            vectors.add_with_ids(self._kept.keys(later), np.array(later, np.int64))
        self._vectors = vectors
        return True

    def _apply(self, commit: Commit) -> bool:
        """Takes a commit into memory; whether the search structure has to be made anew for it."""
        self._kept.apply(commit)
        # A function of the commits alone, so that an index that was closed in between has the same lists.
        trained = MANY // 2 if self._sample is None else len(self._sample)
        if len(self._kept.episodes) <= 2 * trained:
            return False
        self._sample = self._kept.keys(sorted(self._kept.episodes))
        return True

    def _searchable(self) -> Any:
        """FAISS's structure of all that is kept, the oldest first."""
        ids = sorted(self._kept.episodes)
        vectors: Any  # FAISS's stubs know neither its parameters' arguments nor what indices have in common
        if self._sample is None:
            vectors = faiss.IndexIDMap2(faiss.IndexFlatIP(self.dim))
        else:
            lists = round(4 * len(self._sample) ** 0.5)
            vectors = faiss.IndexIVFFlat(faiss.IndexFlatIP(self.dim), self.dim, lists, faiss.METRIC_INNER_PRODUCT)
            vectors.train(self._sample)  # k-means from a fixed seed
        vectors.add_with_ids(self._kept.keys(ids), np.array(ids, np.int64))
        return vectors

    def _parameters(self, step: int) -> Any:
        """How to search: without what has expired but is still there, since no commit came after."""
        expired = self._kept.expired(step)
        hidden = faiss.IDSelectorNot(faiss.IDSelectorBatch(np.array(expired, np.int64))) if expired else None
        exact: Any = faiss.SearchParameters
        inverted: Any = faiss.SearchParametersIVF
        if self._sample is not None:
            return inverted(nprobe=PROBES, sel=hidden)
        return exact(sel=hidden) if hidden is not None else None
