"""What the processes of a run tell each other, and how long they wait for it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cdrmix.training import distributed as parallel
from cdrmix.training.distributed import DistributedContext

Work = Callable[..., list[Any]]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """One store for all ranks, which are threads here."""
    shared = dist.HashStore()
    monkeypatch.setattr(parallel, "rendezvous_store", lambda rank, size: shared)
    return shared


def worlds(size: int) -> list[DistributedContext]:
    return [DistributedContext(rank, size, rank, torch.device("cpu")) for rank in range(size)]


def test_every_rank_gets_every_item_turn_by_turn_and_nothing_is_left_in_the_store(store: dist.Store) -> None:
    found: dict[int, list[list[object]]] = {}

    def body(world: DistributedContext) -> None:
        time.sleep(0.02 * world.rank)
        found[world.rank] = [world.gather((turn, world.rank), "a turn") for turn in range(3)]

    threads = [threading.Thread(target=body, args=(world,)) for world in worlds(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {reader: [[(turn, rank) for rank in range(3)] for turn in range(3)] for reader in range(3)}
    assert store.num_keys() == 3, "one counter of turns a rank"


def test_a_wait_for_the_others_ends_at_a_signal(store: dist.Store) -> None:
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        worlds(2)[1].gather(None, "the preparation of the text")


@pytest.mark.slow
def test_no_thread_of_gloo_is_left_when_the_interpreter_ends(work: Work, tmp_path: Path) -> None:
    """One that still held tensors of the last collective aborted the process, at times, under load."""
    overrides = ("train.steps=4", "train.micro_batch_rows=4")
    finished = work("leave", tmp_path / "run", *overrides, processes=2, script="leave_worker.py")
    for process in finished:
        assert process.returncode == 0, process.stdout
        before, after = re.findall(r"(?:before|after): (\d+)$", process.stdout, re.MULTILINE)
        assert int(before) > 0 == int(after), process.stdout
