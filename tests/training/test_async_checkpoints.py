"""Checkpoints that are written beside the training: the same files, committed late, and what happens to failures."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import cdrmix
from cdrmix.config.schema import Config
from cdrmix.data.shards import ShardSet
from cdrmix.errors import CheckpointError, DiskFullError
from cdrmix.inference.checkpoints import list_checkpoints, verify_checkpoint
from cdrmix.run_folder import RunFolder
from cdrmix.training import checkpoint_writer, distributed
from cdrmix.training.checkpoint_writer import CheckpointWriter, Contents
from cdrmix.training.distributed import DistributedContext
from cdrmix.training.stage_a import train

pytestmark = pytest.mark.usefixtures("own_settings")

ON, OFF = "train.async_checkpoints=true", "train.async_checkpoints=false"


class History(cdrmix.Callback):
    """What the run tells, in order: numbers of steps, names of checkpoints."""

    def __init__(self, act: Callable[[int], None] = lambda step: None) -> None:
        self.told: list[int | str] = []
        self._act = act

    def on_step(self, step: int) -> None:
        self.told.append(step)
        self._act(step)

    def on_checkpoint(self, checkpoint: Path) -> None:
        verify_checkpoint(checkpoint)
        self.told.append(checkpoint.name[-1])


@pytest.fixture
def run(make_config: Callable[..., Config], shards: ShardSet) -> Callable[..., RunFolder]:
    def make(*overrides: str, history: History, folder: RunFolder | None = None) -> RunFolder:
        config = make_config("train.keep_last=9", "train.ema_decay=0.5", "train.evaluate_every=6", *overrides)
        folder = RunFolder.create(config) if folder is None else folder
        train(config, folder, shards, console=False, callbacks=[history])
        return folder

    return make


def contents(run: RunFolder) -> dict[str, bytes]:
    """The files of all checkpoints but those that name times."""
    files = [path for checkpoint in list_checkpoints(run.checkpoints) for path in checkpoint.iterdir()]
    timeless = [path for path in files if path.suffix != ".json" or path.name.startswith("rng")]
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in timeless if path.suffix != ".yaml"}


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writing waits for this event, which does not hold at first."""
    go = threading.Event()
    write = checkpoint_writer.save_file

    def waits(tensors: dict[str, Tensor], path: Path) -> None:
        assert go.wait(60)
        write(tensors, path)

    monkeypatch.setattr(checkpoint_writer, "save_file", waits)
    return go


def test_the_files_are_those_of_a_training_that_waits(run: Callable[..., RunFolder], hold: threading.Event) -> None:
    """The training changes all weights twice before the first file is written."""
    history = History(lambda step: hold.set() if step == 4 else None)
    beside = run(ON, history=history)
    # The checkpoint of step 2 is finished when that of step 4 begins, and the last one before the training ends.
    assert history.told[:5] == [1, 2, 3, 4, "2"]
    assert history.told[-1] == "6"
    assert sorted(each for each in history.told if isinstance(each, str)) == ["2", "4", "6"]
    waiting = History()
    plain = run(OFF, history=waiting)
    assert waiting.told == [1, 2, "2", 3, 4, "4", 5, 6, "6"]
    one, other = contents(beside), contents(plain)
    assert len(one) == 3 * 4
    assert one == other
    assert list(beside.checkpoints.glob("*.tmp-*")) == []


def test_a_checkpoint_is_told_after_the_next_step(run: Callable[..., RunFolder], hold: threading.Event) -> None:
    def release(step: int) -> None:
        if step == 4:
            hold.set()
            for thread in threading.enumerate():
                if thread.name.startswith("checkpoint"):
                    thread.join(60)

    history = History(release)
    run(ON, "train.checkpoint_every=3", history=history)
    assert history.told == [1, 2, 3, 4, 5, "3", 6, "6"]


def test_a_disk_that_fills_up_ends_the_training_soon(
    run: Callable[..., RunFolder], make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint_writer.save_file

    def fills_up(tensors: dict[str, Tensor], path: Path) -> None:
        write(tensors, path)
        if "step-00000004" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_writer, "save_file", fills_up)
    folder, history = RunFolder.create(make_config(ON)), History()
    with pytest.raises(DiskFullError, match=r"step-00000002 is whole\. Free some space"):
        run(ON, history=history, folder=folder)
    assert [each for each in history.told if isinstance(each, str)] == ["2"]
    assert history.told[-1] in (5, 6)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["latest", "step-00000002"]
    assert (folder.checkpoints / "latest").read_text() == "step-00000002\n"


def test_an_error_of_the_training_does_not_lose_the_checkpoint(
    run: Callable[..., RunFolder], make_config: Callable[..., Config], hold: threading.Event
) -> None:
    def fail(step: int) -> None:
        if step == 3:
            threading.Timer(0.3, hold.set).start()
            raise ZeroDivisionError

    folder = RunFolder.create(make_config(ON))
    with pytest.raises(ZeroDivisionError):
        run(ON, history=History(fail), folder=folder)
    assert [path.name for path in list_checkpoints(folder.checkpoints)] == ["step-00000002"]
    verify_checkpoint(list_checkpoints(folder.checkpoints)[0])


def test_what_a_stranger_says_of_a_checkpoint_ends_it_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, which are threads here. What the second has written is replaced in the store."""
    store = dist.HashStore()
    for module in (distributed, checkpoint_writer):
        monkeypatch.setattr(module, "rendezvous_store", lambda rank, size: store)
    written = CheckpointWriter._write

    def write_or_lie(writer: CheckpointWriter) -> None:
        if writer._world.rank == 0:
            written(writer)
        else:
            store.set(writer._parts[1], "x")

    monkeypatch.setattr(CheckpointWriter, "_write", write_or_lie)

    def write(rank: int) -> str:
        world = DistributedContext(rank, 2, rank, torch.device("cpu"))
        text = Contents({}, {f"rng-rank{rank}.json": "{}"})
        try:
            CheckpointWriter(world, tmp_path, text, step=3, periodic=True, best=False).finish()
        except CheckpointError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(write, range(2)))
    for message in said:
        assert "process 1 said of its files of" in message
        assert "what cannot be read" in message
    assert not list(tmp_path.iterdir())


def test_a_process_that_is_gone_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, which are threads here. The second never writes."""
    store = dist.HashStore()
    for module in (distributed, checkpoint_writer):
        monkeypatch.setattr(module, "rendezvous_store", lambda rank, size: store)
    work = CheckpointWriter._write
    monkeypatch.setattr(CheckpointWriter, "_write", lambda self: work(self) if self._world.rank == 0 else None)

    def write(rank: int) -> CheckpointWriter:
        world = DistributedContext(rank, 2, rank, torch.device("cpu"))
        text = Contents({}, {f"rng-rank{rank}.json": "{}"})
        return CheckpointWriter(world, tmp_path, text, step=3, periodic=True, best=False)

    with ThreadPoolExecutor(2) as pool:
        first, _ = pool.map(write, range(2))
    time.sleep(0.1)
    assert not first.written
    assert [path.name for path in tmp_path.iterdir()] == [f"step-00000003.tmp-{os.getpid()}"]
    first.abandon(0.1)
    assert first.written
    assert list(tmp_path.iterdir()) == []


def test_a_defect_is_raised_and_not_called_a_full_disk(
    run: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(tensors: dict[str, Tensor], path: Path) -> None:
        raise RuntimeError("two tensors share memory")

    monkeypatch.setattr(checkpoint_writer, "save_file", defect)
    with pytest.raises(RuntimeError, match="two tensors share memory"):
        run(ON, history=History())
