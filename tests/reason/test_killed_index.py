"""An episodic memory whose process is killed, whose disk fails or whose cache is damaged, at every position."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cdrmix.errors import MemoryLogError
from cdrmix.reason.memory import episodic_index, faiss_vectors
from cdrmix.reason.memory.episodic_index import EpisodicIndex
from cdrmix.reason.memory.kept_episodes import Staged

DRIVER = Path(__file__).with_name("killed_index_driver.py")
DIM = 8


def key(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(DIM).astype(np.float32)


def staged(*seeds: int) -> Staged:
    changes = Staged()
    for seed in seeds:
        changes.add(key(seed), np.arange(seed, seed + 4, dtype=np.uint32))
    return changes


def all_of(index: EpisodicIndex) -> list[tuple[int, list[int]]]:
    (hits,) = index.search(key(99)[None], 10**6, step=0)
    return [(hit.id, hit.tokens.tolist()) for hit in hits]


@pytest.mark.gate
@pytest.mark.parametrize(
    ("scenario", "least"),
    [
        ("torn", 12),
        pytest.param("new", 50, marks=pytest.mark.slow),
        pytest.param("cached", 80, marks=pytest.mark.long),
    ],
)
def test_killed_at_every_call_that_touches_the_disk(tmp_path: Path, scenario: str, least: int) -> None:
    """Real processes and SIGKILL: no acknowledged commit is lost, no rejected one is visible, all bytes are equal."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, DRIVER, tmp_path, scenario]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    kills = Counter(line.split()[0] for line in done.stdout.splitlines())
    assert min(kills[moment] for moment in ("before", "within", "after")) >= least, kills


@pytest.mark.parametrize("name", ["pwrite", "fdatasync"])
def test_a_disk_that_fails_once_rejects_that_commit_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    index = EpisodicIndex(tmp_path, DIM, 1000)
    index.commit(staged(1), 0)
    before, content = all_of(index), (tmp_path / "episodes.log").read_bytes()
    real = getattr(os, name)

    def fails(*arguments: Any) -> Any:
        monkeypatch.setattr(os, name, real)
        if name == "fdatasync":
            return real(*arguments), fail()
        real(arguments[0], arguments[1][:9], arguments[2])
        return fail()

    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, name, fails)
    with pytest.raises(OSError, match="Input/output error"):
        index.commit(staged(2), 1)
    assert all_of(index) == before
    assert (tmp_path / "episodes.log").read_bytes() == content
    assert index.commit(staged(3), 1) == [1]
    held = all_of(index)
    index.close()
    assert all_of(EpisodicIndex(tmp_path, DIM, 1000)) == held


def test_a_disk_that_does_not_take_a_rejection_back_gets_no_further_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = EpisodicIndex(tmp_path, DIM, 1000)
    index.commit(staged(1), 0)

    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fails)
    monkeypatch.setattr(os, "ftruncate", fails)
    with pytest.raises(OSError, match="Input/output error"):
        index.commit(staged(2), 1)
    monkeypatch.undo()
    with pytest.raises(MemoryLogError, match="the disk failed in an earlier commit"):
        index.commit(staged(3), 1)
    assert [id for id, _ in all_of(index)] == [0]


WRITER = """
import sys
from pathlib import Path
from cdrmix.reason.memory.episodic_index import EpisodicIndex
index = EpisodicIndex(Path(sys.argv[1]), 8, 1000)
print("open", flush=True)
sys.stdin.read()
"""


def test_two_processes_cannot_write(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    with pytest.raises(MemoryLogError, match="open in another process"):
        EpisodicIndex(tmp_path, DIM, 1000)
    child.kill()
    child.communicate()
    EpisodicIndex(tmp_path, DIM, 1000).close()  # a lock dies with its process


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A closed memory of 26 episodes, whose inverted file was trained on the first 17."""
    monkeypatch.setattr(episodic_index, "MANY", 16)
    monkeypatch.setattr(faiss_vectors, "PROBES", 10**4)
    index = EpisodicIndex(tmp_path, DIM, 10**4)
    for number in range(17):
        index.commit(staged(number), number)
    assert index._sample is not None
    for number in range(17, 26):
        index.commit(staged(number), number)
    index.close()
    return tmp_path


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[int, list[int]]], int]:
    """The contents of a memory, and how often its search structure was made."""
    made = []
    real = EpisodicIndex._make_vectors
    with monkeypatch.context() as context:
        context.setattr(EpisodicIndex, "_make_vectors", lambda index: made.append(1) or real(index))
        index = EpisodicIndex(folder, DIM, 10**4)
    held = all_of(index)
    index.close()
    return held, len(made)


def test_the_cache_saves_making_the_lists(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, made = opened(cached, monkeypatch)
    assert (len(held), made) == (26, 0)
    (cached / "episodes.cache").unlink()
    assert opened(cached, monkeypatch) == (held, 1)
    assert opened(cached, monkeypatch) == (held, 0)  # it was written again


def test_an_old_cache_is_brought_up_to_date(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process killed before it closes leaves an old cache; opening applies the later removals and additions."""
    old = {path.name: path.read_bytes() for path in cached.glob("episodes.cache*")}
    index = EpisodicIndex(cached, DIM, 90)
    index.commit(staged(50, 51), 30)  # 26 x 4 + 8 tokens: six episodes go
    held = all_of(index)
    assert len(held) == 22
    index.close()
    for name, content in old.items():
        (cached / name).write_bytes(content)
    assert opened(cached, monkeypatch) == (held, 0)


def test_any_bit_of_the_cache_or_its_manifest(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, _ = opened(cached, monkeypatch)
    rng = np.random.default_rng(1)
    for name in ("episodes.cache", "episodes.cache.json"):
        content = (cached / name).read_bytes()
        for offset in rng.choice(len(content), 60, replace=False).tolist():
            flipped = bytearray(content)
            flipped[offset] ^= 1 << int(rng.integers(8))
            (cached / name).write_bytes(flipped)
            assert opened(cached, monkeypatch)[0] == held
            (cached / name).write_bytes(content[:offset])
            assert opened(cached, monkeypatch)[0] == held


def test_the_cache_of_another_log_is_not_taken(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers of commits and bytes, but other contents: the log was cut, and another commit followed."""
    old = {path.name: path.read_bytes() for path in cached.glob("episodes.cache*")}
    index = EpisodicIndex(cached, DIM, 10**4)
    before = (index._log.sequence, index._log.size)
    index.close()
    frame = (before[1] - 28) // 26  # behind a header of 28 bytes; all frames are of one size
    os.truncate(cached / "episodes.log", before[1] - frame)
    index = EpisodicIndex(cached, DIM, 10**4)
    index.commit(staged(77), 25)
    held = all_of(index)
    assert (index._log.sequence, index._log.size) == before
    index.close()
    for name, content in old.items():
        (cached / name).write_bytes(content)
    assert opened(cached, monkeypatch) == (held, 1)


def test_a_full_disk_costs_the_cache_alone(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, _ = opened(cached, monkeypatch)
    index = EpisodicIndex(cached, DIM, 10**4)
    index.commit(staged(60), 40)
    real = os.replace

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    index.close()
    monkeypatch.setattr(os, "replace", real)
    assert len(opened(cached, monkeypatch)[0]) == len(held) + 1


def test_without_many_episodes_there_is_no_cache(tmp_path: Path) -> None:
    index = EpisodicIndex(tmp_path, DIM, 1000)
    index.commit(staged(1, 2, 3), 0)
    index.close()
    assert [path.name for path in tmp_path.iterdir()] == ["episodes.log"]
