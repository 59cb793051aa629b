"""Kills processes that work on an episodic memory, at every call that writes to the disk, and checks the files.

python killed_index_driver.py FOLDER SCENARIO: forks a child for every such call, which dies by SIGKILL right before
it, in the middle of it (a write) or right after it; prints a line for every kill, and fails by an assertion. Forking
from here, before there are threads, makes a hundred killed processes a matter of seconds.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from cdrmix.reason.memory import episodic_index
from cdrmix.reason.memory.episodic_index import EpisodicIndex
from cdrmix.reason.memory.kept_episodes import Staged

DIM, COMMITS = 8, 20
MAX_TOKENS = 60
REJECTED = 1_000_000  # tokens from here on were staged and never committed
CALLS = ("open", "close", "pwrite", "pread", "fsync", "fdatasync", "ftruncate", "replace", "unlink")
ACKNOWLEDGE = os.write  # the original, taken before functions of os are replaced


def key(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(DIM).astype(np.float32)


def changes_of(number: int, index: EpisodicIndex) -> Staged:
    """The changes of commit `number`: it reads near episodes and adds one or two, some of which expire."""
    staged = Staged()
    staged.use(index.search(key(number)[None], 2, number)[0])
    for part in range(1 + number % 2):
        expires = number + 3 if number % 5 == 4 else -1
        staged.add(key(100 * number + part), np.full(5 + number % 3, 10 * number + part, np.uint32), expires)
    return staged


def rejected(number: int) -> Staged:
    staged = Staged()
    staged.add(key(number), np.full(7, REJECTED + number, np.uint32))
    return staged


def work(folder: Path, acknowledge: Callable[[int], None]) -> None:
    """Continues where the log ends; every other step is rolled back."""
    index = EpisodicIndex(folder, DIM, MAX_TOKENS)
    acknowledge(index._log.sequence)
    while index._log.sequence < COMMITS:
        number = index._log.sequence
        rejected(number)  # a proposal that is rolled back: it is let go
        index.commit(changes_of(number, index), number)
        acknowledge(index._log.sequence)
    index.close()


def seen(index: EpisodicIndex) -> tuple[Any, ...]:
    """The whole state of a memory: its episodes in their order of use, and the bytes of the search structure."""
    kept = [(e.id, e.key.tobytes(), e.tokens.tobytes(), e.expires) for e in index._kept.episodes.values()]
    exact = index._sample is None  # of an inverted file the order within lists is left open
    return kept, index._kept.next_id, index.tokens, index._vectors.content() if exact else None


def references(folder: Path) -> tuple[list[tuple[Any, ...]], bytes]:
    """The state of an undisturbed memory after every number of commits; its log at the end."""
    index = EpisodicIndex(folder, DIM, MAX_TOKENS)
    held = [seen(index)]
    for number in range(COMMITS):
        index.commit(changes_of(number, index), number)
        held.append(seen(index))
    index.close()
    return held, (folder / "episodes.log").read_bytes()


def die_at(call: int, moment: str) -> None:
    """Replaces the calls that write to the disk: the one with this number ends the process."""
    count = itertools.count()

    def replaced(name: str, real: Any) -> Any:
        def calls(*arguments: Any) -> Any:
            if next(count) != call:
                return real(*arguments)
            if moment == "after":
                with suppress(FileNotFoundError):
                    real(*arguments)
            elif moment == "within" and name == "pwrite":
                file, content, offset = arguments
                real(file, content[: len(content) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        return calls

    for name in CALLS:
        setattr(os, name, replaced(name, getattr(os, name)))


def killed(folder: Path, call: int, moment: str) -> tuple[bool, list[int]]:
    """Whether a child process on `folder` reached that call and died; the commits that it acknowledged."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        die_at(call, moment)
        work(folder, lambda position: ACKNOWLEDGE(write, bytes([position])) and None)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        acknowledged = list(pipe.read())
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"call {call}, {moment}: the child failed"
    return os.WIFSIGNALED(status), acknowledged


def check(folder: Path, acknowledged: list[int], began: int, held: list[tuple[Any, ...]], log: bytes) -> None:
    """Every acknowledged commit is there, no rejected one; after the rest of the work all is as without the kill."""
    index = EpisodicIndex(folder, DIM, MAX_TOKENS)
    last, found = acknowledged[-1] if acknowledged else began, index._log.sequence
    assert last <= found <= last + 1, f"{found} commits after {last} were acknowledged"
    assert seen(index) == held[found]
    assert all((e.tokens < REJECTED).all() for e in index._kept.episodes.values())
    index.close()
    work(folder, lambda position: None)
    assert (folder / "episodes.log").read_bytes() == log
    index = EpisodicIndex(folder, DIM, MAX_TOKENS)
    assert seen(index) == held[COMMITS]
    index.close()


def main() -> None:
    """scenario: "new", from nothing; "torn": from a log whose last commit was half written; "cached": with a cache."""
    global MAX_TOKENS
    root, scenario = Path(sys.argv[1]), sys.argv[2]
    if scenario == "cached":
        episodic_index.MANY, MAX_TOKENS = 16, 10**4  # 17 episodes, the fewest for which FAISS makes 4 sqrt(n) lists
    faiss.omp_set_num_threads(1)
    held, log = references(root / "reference")
    cut = len(log) - 30
    for moment in ("before", "within", "after"):
        for call in itertools.count():
            folder = root / f"{moment}-{call}"
            began = 0
            if scenario == "torn":
                folder.mkdir()
                (folder / "episodes.log").write_bytes(log[:cut])
                began = COMMITS - 1
            died, acknowledged = killed(folder, call, moment)
            check(folder, acknowledged, began, held, log)
            shutil.rmtree(folder)
            if not died:
                break
            print(moment, call, len(acknowledged))


if __name__ == "__main__":
    main()
