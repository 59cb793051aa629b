"""Episodic memory: exact search, transactions, eviction, and a log that survives kills and reports damage."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdrmix.errors import MemoryLogError
from cdrmix.reason.memory import episodic_index, faiss_vectors
from cdrmix.reason.memory.episode_log import NEVER, EpisodeLog
from cdrmix.reason.memory.episodic_index import EpisodicIndex
from cdrmix.reason.memory.kept_episodes import Hit, Staged

DIM = 8


def key(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(DIM).astype(np.float32)


def tokens(seed: int, count: int = 4) -> np.ndarray:
    return np.arange(seed, seed + count, dtype=np.uint32)


def staged(*seeds: int, count: int = 4, expires: int = NEVER) -> Staged:
    changes = Staged()
    for seed in seeds:
        changes.add(key(seed), tokens(seed, count), expires)
    return changes


def filled(folder: Path, commits: int, max_tokens: int = 1000) -> EpisodicIndex:
    index = EpisodicIndex(folder, DIM, max_tokens)
    for number in range(commits):
        index.commit(staged(2 * number, 2 * number + 1), step=number)
    return index


def contents(index: EpisodicIndex) -> list[tuple[int, list[int]]]:
    """The contents of an index, from a search for all episodes; in the order of the scores."""
    (hits,) = index.search(key(99)[None], 10**6, step=0)
    return [(hit.id, hit.tokens.tolist()) for hit in hits]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    return tmp_path / "memory"


def test_the_nearest_are_found_exactly(folder: Path) -> None:
    index = EpisodicIndex(folder, DIM, 10**6)
    keys = np.stack([key(seed) for seed in range(200)])
    for first in range(0, 200, 7):
        index.commit(staged(*range(first, min(first + 7, 200))), step=first)
    queries = np.stack([key(seed) for seed in range(1000, 1010)])
    cosines = (queries / np.linalg.norm(queries, axis=1)[:, None]) @ (keys / np.linalg.norm(keys, axis=1)[:, None]).T
    for hits, row in zip(index.search(queries, 5, step=0), cosines, strict=True):
        assert [hit.id for hit in hits] == np.argsort(-row)[:5].tolist()
        # float32, unit vectors of width 8: a sum of 8 products and two scalings
        np.testing.assert_allclose([hit.score for hit in hits], np.sort(row)[::-1][:5], atol=2e-6)
        assert all((hit.tokens == tokens(hit.id)).all() for hit in hits)


def test_what_is_staged_is_seen_by_nobody_and_leaves_nothing(folder: Path) -> None:
    index = filled(folder, 2)
    before, position = contents(index), (index._log.sequence, index._log.size)
    content = (folder / "episodes.log").read_bytes()
    changes = staged(50)
    changes.use([Hit(0, 1.0, tokens(0))])
    del changes
    assert (contents(index), (index._log.sequence, index._log.size)) == (before, position)
    assert (folder / "episodes.log").read_bytes() == content
    assert index.commit(Staged(), step=3) == []
    assert (index._log.sequence, index._log.size) == position


def test_the_log_gives_the_same_index_again(folder: Path) -> None:
    index = filled(folder, 5, max_tokens=30)
    index.commit(staged(60, expires=9), step=5)
    first = contents(index), (index._log.sequence, index._log.size), index.tokens, list(index._kept.episodes)
    index.close()
    again = EpisodicIndex(folder, DIM, 30)
    assert (contents(again), (again._log.sequence, again._log.size), again.tokens, list(again._kept.episodes)) == first
    assert again.commit(staged(61), step=6) == [11]  # ids go on, although some are gone


def test_eviction_takes_what_was_used_the_longest_time_ago(folder: Path) -> None:
    index = EpisodicIndex(folder, DIM, 16)
    for number in range(4):
        index.commit(staged(number), step=number)
    changes = staged(10)
    changes.use(index.search(key(0)[None], 1, step=4)[0])
    assert index.commit(changes, step=4) == [4]
    assert sorted(index._kept.episodes) == [0, 2, 3, 4]
    assert index.commit(staged(11, 12, 13, 14, 15), step=5) == [5, 6, 7, 8, 9]
    assert sorted(index._kept.episodes) == [6, 7, 8, 9]  # even of its own, the first
    assert index.tokens == 16


def test_what_was_read_is_kept_for_longer_in_later_steps(folder: Path) -> None:
    index = EpisodicIndex(folder, DIM, 16)
    for number in range(4):
        index.commit(staged(number), step=number)
    changes = Staged()
    changes.use(index.search(key(0)[None], 1, step=4)[0])
    assert index.commit(changes, step=4) == []
    index.commit(staged(10), step=5)
    assert sorted(index._kept.episodes) == [0, 2, 3, 4]


def test_the_expired_are_not_found_and_then_gone(folder: Path) -> None:
    index = EpisodicIndex(folder, DIM, 1000)
    index.commit(staged(1, expires=5), step=0)
    index.commit(staged(2), step=1)
    assert {hit.id for hit in index.search(key(1)[None], 9, step=4)[0]} == {0, 1}
    assert {hit.id for hit in index.search(key(1)[None], 9, step=5)[0]} == {1}
    index.commit(staged(3), step=5)
    assert sorted(index._kept.episodes) == [1, 2]


@pytest.mark.parametrize("bad", [np.zeros(DIM), np.full(DIM, np.nan), np.ones(DIM + 1)])
def test_a_bad_key_is_refused_and_nothing_changed(folder: Path, bad: np.ndarray) -> None:
    index = filled(folder, 1)
    position, changes = (index._log.sequence, index._log.size), staged(7)
    changes.add(bad.astype(np.float32), tokens(0))
    with pytest.raises(ValueError, match="key must be 8 finite numbers"):
        index.commit(changes, step=1)
    with pytest.raises(ValueError, match="max_tokens is 1000"):
        index.commit(staged(7, count=1001), step=1)
    assert (index._log.sequence, index._log.size) == position
    assert len(index) == 2


def test_one_writer(folder: Path) -> None:
    index = filled(folder, 1)
    with pytest.raises(MemoryLogError, match="open in another process"):
        EpisodicIndex(folder, DIM, 1000)
    index.close()
    EpisodicIndex(folder, DIM, 1000).close()


def test_another_width_and_another_file_are_refused(folder: Path) -> None:
    filled(folder, 1).close()
    with pytest.raises(MemoryLogError, match=r"width 8, but reasoning\.memory\.dim is 16"):
        EpisodicIndex(folder, 16, 1000)
    (folder / "episodes.log").write_bytes(b"no log at all" * 9)
    with pytest.raises(MemoryLogError, match="is no episode log"):
        EpisodicIndex(folder, DIM, 1000)


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[int], list[list[tuple[int, list[int]]]]]:
    """A log of four commits, the end of each, and the contents of the index after it."""
    folder = tmp_path_factory.mktemp("logged")
    index = EpisodicIndex(folder, DIM, 20)
    ends, held = [(index._log.sequence, index._log.size)[1]], [contents(index)]
    for number in range(4):
        changes = staged(2 * number, 2 * number + 1)
        changes.use(index.search(key(number)[None], 1, step=0)[0])
        index.commit(changes, step=number)
        ends.append((index._log.sequence, index._log.size)[1])
        held.append(contents(index))
    index.close()
    return (folder / "episodes.log").read_bytes(), ends, held


def test_cut_at_any_byte_whole_commits_stay(logged: tuple, tmp_path: Path) -> None:
    content, ends, held = logged
    for size in range(len(content) + 1):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "episodes.log").write_bytes(content[:size])
        index = EpisodicIndex(folder, DIM, 20)
        whole = sum(end <= size for end in ends[1:])
        assert (index._log.sequence, contents(index)) == (whole, held[whole])
        assert index.dropped_bytes == max(0, size - ends[whole])
        kept = (folder / "episodes.log").read_bytes()
        assert kept == content[: ends[whole]]
        if index.dropped_bytes:  # moved, not thrown away
            assert (folder / f"episodes.log.cut-at-{ends[whole]}").read_bytes() == content[ends[whole] : size]
        assert index.commit(staged(70), step=9) != []
        index.close()
        shutil.rmtree(folder)


@given(data=st.data())
def test_a_flipped_bit_is_found(logged: tuple, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Damage in the last commit, which may be incomplete, moves it to another file; damage before it is an error."""
    content, ends, held = logged
    offset, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    folder = tmp_path_factory.mktemp("flipped")
    flipped = bytearray(content)
    flipped[offset] ^= 1 << bit
    (folder / "episodes.log").write_bytes(flipped)
    last = ends[-2]
    if offset >= last + 20:  # its payload
        index = EpisodicIndex(folder, DIM, 20)
        assert (index._log.sequence, contents(index)) == (3, held[3])
        assert (folder / f"episodes.log.cut-at-{last}").read_bytes() == flipped[last:]
        index.close()
    else:
        with pytest.raises(MemoryLogError, match=r"damaged|no episode log|version"):
            EpisodicIndex(folder, DIM, 20)
        assert (folder / "episodes.log").read_bytes() == flipped
    shutil.rmtree(folder)


def test_the_message_for_damage_says_what_is_whole_and_how_to_go_on(logged: tuple, folder: Path) -> None:
    content, ends, held = logged
    damaged = bytearray(content)
    damaged[ends[1] + 30] ^= 4
    folder.mkdir()
    (folder / "episodes.log").write_bytes(damaged)
    with pytest.raises(MemoryLogError, match=rf"commit 1, at byte {ends[1]} .* truncate -s {ends[1]} "):
        EpisodicIndex(folder, DIM, 20)
    os.truncate(folder / "episodes.log", ends[1])
    index = EpisodicIndex(folder, DIM, 20)
    assert contents(index) == held[1]


CHILD = """
import sys
from pathlib import Path
import numpy as np
from cdrmix.reason.memory.episodic_index import EpisodicIndex
from cdrmix.reason.memory.kept_episodes import Staged
index = EpisodicIndex(Path(sys.argv[1]), 8, 10**6)
print("open", len(index), flush=True)
for number in range(10**6):
    staged = Staged()
    staged.add(np.ones(8, np.float32), np.full(2000, number, np.uint32))
    index.commit(staged, number)
    print(index._log.sequence, flush=True)
"""


def test_a_killed_writer_loses_nothing_it_had_acknowledged(folder: Path) -> None:
    """SIGKILL at six moments of a process that only commits."""
    acknowledged = 0
    for moment in (0.0, 0.001, 0.004, 0.013, 0.03, 0.05):
        child = subprocess.Popen([sys.executable, "-c", CHILD, folder], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == f"open {acknowledged}\n"
        try:
            child.wait(moment)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
        rest, _ = child.communicate()
        lines = [int(line) for line in rest.splitlines()]
        assert all(later == earlier + 1 for earlier, later in pairwise(lines))
        index = EpisodicIndex(folder, DIM, 10**6)
        assert index._log.sequence in (lines[-1:] or [acknowledged]) + [(lines[-1] if lines else acknowledged) + 1]
        acknowledged = index._log.sequence
        index.close()
    assert acknowledged > 10


def test_a_disk_that_is_full_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = filled(folder, 2)
    before, position = contents(index), (index._log.sequence, index._log.size)

    def full(file: int, data: bytes, offset: int) -> int:
        if len(data) < 40:
            raise OSError(28, "No space left on device")
        return os.write(file, b"") or real(file, data[: len(data) // 2], offset)

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="disk is full"):
        index.commit(staged(9), step=3)
    monkeypatch.undo()
    assert (contents(index), (index._log.sequence, index._log.size)) == (before, position)
    assert (folder / "episodes.log").stat().st_size == position[1]
    assert index.commit(staged(9), step=3) == [4]


def test_many_episodes_are_searched_by_an_inverted_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a search reads all lists it is exact; reopened it is equal, although it was trained on fewer episodes."""
    monkeypatch.setattr(episodic_index, "MANY", 300)
    monkeypatch.setattr(faiss_vectors, "PROBES", 75)
    index = EpisodicIndex(folder, DIM, 10**6)
    for first in range(0, 700, 50):
        index.commit(staged(*range(first, first + 50)), step=first)
    assert index._sample is not None
    assert len(index._sample) == 350  # 75 lists; twice as many episodes are not yet more than that
    queries = np.stack([key(900), key(901)])
    found = index.search(queries, 6, 0)
    index.close()
    again = EpisodicIndex(folder, DIM, 10**6)
    for hits, others, query in zip(found, again.search(queries, 6, 0), queries, strict=True):
        assert [hit[:2] for hit in hits] == [hit[:2] for hit in others]
        keys = np.stack([key(seed) / np.linalg.norm(key(seed)) for seed in range(700)])
        assert [hit.id for hit in hits] == np.argsort(-keys @ query)[:6].tolist()


def test_without_faiss_the_same_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal keys, expired and evicted episodes, and a count larger than the number of episodes."""
    indices = [EpisodicIndex(tmp_path / "faiss", DIM, 300)]
    monkeypatch.setattr(episodic_index, "HAS_FAISS", False)
    monkeypatch.setattr(episodic_index, "MANY", 16)  # above which FAISS would make lists
    indices.append(EpisodicIndex(tmp_path / "numpy", DIM, 300))
    for step in range(60):
        for index in indices:
            changes = staged(step, step % 7, expires=step + 9 if step % 3 else -1)
            changes.use(index.search(key(step + 1)[None], 2, step)[0])
            index.commit(changes, step)
        queries = np.stack([key(seed) for seed in (step % 7, 1000 + step)])
        for count in (1, 4, 200):
            by_faiss, by_numpy = (index.search(queries, count, step + 5) for index in indices)
            for ours, theirs in zip(by_numpy, by_faiss, strict=True):
                assert [hit.id for hit in ours] == [hit.id for hit in theirs]
                np.testing.assert_allclose([hit.score for hit in ours], [hit.score for hit in theirs], atol=1e-6)
    assert 40 < len(indices[0]) < 120
    for index in indices:
        index.close()
    assert (tmp_path / "faiss" / "episodes.log").read_bytes() == (tmp_path / "numpy" / "episodes.log").read_bytes()


def test_the_log_is_read_once(folder: Path) -> None:
    filled(folder, 2).close()
    log = EpisodeLog(folder, DIM)
    assert len(list(log.commits())) == 2
    with pytest.raises(AssertionError, match="once"):
        list(log.commits())
