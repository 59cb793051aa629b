"""The memory suite's cases: commits, searches and opening of an episodic index, compared with FAISS or a plain file.

Commits wait for the disk, so their time depends on the machine: the peer writes as many bytes to a file and waits too.
A search is FAISS's search and our checks and tokens. Opening reads a log with one commit for each episode, which is the
most work for that number of episodes; the peer reads FAISS's own file.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import faiss
import numpy as np
from cases import Case, Options, Result, quantiles

from cdrmix.reason.memory.episodic_index import EpisodicIndex
from cdrmix.reason.memory.kept_episodes import Staged

DIM, TOKENS, TOP_K = 512, 64, 8
STORED, REBUILT = 10_000, 50_000
WARM = 5  # calls before the first timing


def keys(count: int) -> np.ndarray:
    """Random directions; they do not matter for an exact search."""
    return np.random.default_rng(1).standard_normal((count, DIM)).astype(np.float32)


@contextmanager
def filled(count: int) -> Iterator[tuple[Path, np.ndarray]]:
    """A closed folder with an index of so many episodes, each committed by itself; and their keys."""
    with tempfile.TemporaryDirectory() as folder, one_thread():
        made = keys(count)
        index = EpisodicIndex(Path(folder), DIM, 10**9)
        with mock.patch.object(os, "fdatasync"):  # skips 50,000 waits for the disk, which are not measured here
            for number in range(count):
                index.commit(episode(made[number]), number)
        index.close()
        yield Path(folder), made


@contextmanager
def one_thread() -> Iterator[None]:
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(threads)


def episode(key: np.ndarray) -> Staged:
    staged = Staged()
    staged.add(key, np.arange(TOKENS, dtype=np.uint32))
    return staged


class Times:
    """Milliseconds of ours and of the peer, paired; and our CPU time, which depends less on other work."""

    def __init__(self, calls: int, ours: Callable[[int], object], peer: Callable[[int], object]) -> None:
        self.ours: list[float] = []
        self.peer: list[float] = []
        self.processor: list[float] = []
        for number in range(WARM + calls):
            begun, used = time.perf_counter(), time.process_time()
            ours(number)
            middle, used = time.perf_counter(), time.process_time() - used
            peer(number)
            if number >= WARM:
                self.ours.append(1000 * (middle - begun))
                self.processor.append(1000 * used)
                self.peer.append(1000 * (time.perf_counter() - middle))


def result(unit: str, peer_name: str, times: Times, **more: Any) -> Result:
    found = quantiles(times.ours)
    return Result(
        unit=unit,
        peer_name=peer_name,
        ours=times.ours,
        peer=times.peer,
        figures={"median": found["p50"], "processor": quantiles(times.processor)["p50"]},
        settings={
            "dim": DIM,
            "tokens": TOKENS,
            "threads": 1,
            "device": "cpu",
            "faiss": faiss.__version__,
            "disk": os.environ.get("TMPDIR", tempfile.gettempdir()),
            **more,
        },
    )


def commit(options: Options) -> Result:
    """One episode added and on the disk, in an index of 10,000."""
    with filled(STORED) as (folder, made):
        index = EpisodicIndex(folder, DIM, 10**9)
        frame = b"\1" * ((folder / "episodes.log").stat().st_size // STORED)
        file = os.open(folder / "peer", os.O_RDWR | os.O_CREAT)

        def write(number: int) -> None:
            os.pwrite(file, frame, number * len(frame))
            os.fdatasync(file)

        times = Times(10 * options.blocks, lambda number: index.commit(episode(made[number]), STORED + number), write)
        os.close(file)
        index.close()
    return result("ms a commit", "pwrite and fdatasync of as many bytes", times, episodes=STORED)


def search(options: Options) -> Result:
    """The 8 nearest of 10,000 keys to one query."""
    with filled(STORED) as (folder, made):
        index = EpisodicIndex(folder, DIM, 10**9)
        flat = faiss.IndexFlatIP(DIM)
        flat.add(made)  # type: ignore[call-arg]
        queries = keys(WARM + 10 * options.blocks)
        times = Times(
            10 * options.blocks,
            lambda number: index.search(queries[number : number + 1], TOP_K, 0),
            lambda number: flat.search(queries[number : number + 1], TOP_K),  # type: ignore[call-arg]
        )
        index.close()
    return result("ms a query", "faiss.IndexFlatIP alone", times, episodes=STORED, top_k=TOP_K)


def opening(options: Options) -> Result:
    """50,000 episodes, checked and made searchable, from the log alone."""
    with filled(REBUILT) as (folder, made):
        flat = faiss.IndexFlatIP(DIM)
        flat.add(made)  # type: ignore[call-arg]
        faiss.write_index(flat, str(folder / "peer"))
        size = (folder / "episodes.log").stat().st_size

        def ours(_: int) -> None:
            EpisodicIndex(folder, DIM, 10**9).close()

        times = Times(max(5, options.blocks // 2), ours, lambda _: faiss.read_index(str(folder / "peer")))
    return result(
        "ms to open", "faiss.read_index, unchecked", times, episodes=REBUILT, log_megabytes=round(size / 1e6, 1)
    )


CASES = {
    "commit": Case(commit, "one episode added and on the disk, among 10,000 of width 512", ("cpu",)),
    "search": Case(search, "exact search of 10,000 keys of width 512, one query", ("cpu",)),
    "opening": Case(opening, "50,000 episodes of width 512 from their log", ("cpu",)),
}
