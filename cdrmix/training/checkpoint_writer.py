"""Writes a checkpoint beside the training: each process its files in a thread, then the first process commits.

The thread of each process writes its files, flushes them to the disk, and puts their sizes and hashes into the store
that the processes share. When the thread of the first process has those of all, it writes the manifest and renames the
folder. The threads use no collectives, which would mix with those of the training.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from cdrmix.durable import (
    disk_full,
    is_disk_full,
    sha256_file,
    sync_file,
    sync_folder,
    wait_until,
    write_atomically,
)
from cdrmix.errors import CdrmixError, CheckpointError
from cdrmix.inference.checkpoints import FORMAT, MANIFEST, list_checkpoints
from cdrmix.training import messages
from cdrmix.training.distributed import DistributedContext
from cdrmix.training.rendezvous import TIMEOUT, rendezvous_store, tell
from cdrmix.training.retention import BEST, LATEST, set_aside


def when_full(folder: Path) -> str:
    """What is left in a folder of checkpoints when the disk is full, and what to do."""
    names = ", ".join(path.name for path in list_checkpoints(folder))
    if not names:
        return "No checkpoint is there yet. Free some space, then begin again; --resume auto uses the same run folder."
    is_whole = "is whole" if "," not in names else "are whole"
    return f"{names} {is_whole}. Free some space or lower train.keep_last, then continue with --resume auto."


class Contents(NamedTuple):
    """What one process writes, by file name: tensors, which nothing may change before the end, and texts."""

    tensors: dict[str, dict[str, Tensor]]
    texts: dict[str, str]


class _Failure(NamedTuple):
    full: bool  # the disk
    text: str


UNEXPECTED = _Failure(False, "an unexpected error in another process")


class CheckpointWriter:
    """A checkpoint that is being written to `folder`/step-NNNNNNNN. Every process makes one and calls `finish`.

    contents: of this process. periodic: whether the checkpoint counts for `train.keep_last`. best: whether `best` will
    point to it; `latest` will.
    """

    def __init__(
        self, world: DistributedContext, folder: Path, contents: Contents, *, step: int, periodic: bool, best: bool
    ) -> None:
        self.path = folder / f"step-{step:08d}"
        self._world, self._contents = world, contents
        self._manifest = {"format": FORMAT, "step": step, "periodic": periodic}
        self._pointers = (LATEST, BEST) if best else (LATEST,)
        self._store = rendezvous_store(world.rank, world.size) if world.size > 1 else dist.HashStore()
        # Every process is here: the checkpoint before is finished in all of them.
        turn, owner = world.gather(
            (self._store.add(f"checkpoints of {world.rank}", 1), os.getpid()), "the start of a checkpoint"
        )[0]
        self._temporary = folder / f"{self.path.name}.tmp-{owner}"
        self._parts = [f"part {rank} of checkpoint {turn}" for rank in range(world.size)]
        self._outcome = f"outcome of checkpoint {turn}"
        if world.is_main_process and turn > 1 and world.size > 1:
            self._store.delete_key(f"outcome of checkpoint {turn - 1}")
        self._abandoned = threading.Event()
        pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._work = pool.submit(self._write)
        pool.shutdown(wait=False)

    @property
    def written(self) -> bool:
        """In the first process: whether the checkpoint is committed, or has failed."""
        return self._work.done()

    def finish(self) -> Path:
        """Waits until the checkpoint is committed. Every process calls. Returns its path.

        Raises DiskFullError or CheckpointError in every process; then what was written has been removed. An error of
        another kind is raised in its process.
        """
        limit = TIMEOUT.total_seconds()
        try:
            self._work.result(limit)
        except TimeoutError:
            self._abandoned.set()
            raise CheckpointError(f"{self._temporary} was not written in {limit:.0f} s: its disk hangs") from None
        what = f"the commit of {self.path}" if self._world.rank == 1 else ""  # one of them says it
        if not wait_until(lambda: self._store.check([self._outcome]), limit, lambda seconds: tell(seconds, what)):
            raise CheckpointError(f"{self.path} was not committed in {limit:.0f} s: the first process hangs")
        said = messages.read(self._store.get(self._outcome), "process 0", f"the commit of {self.path}")
        failures = [_Failure(*each) for each in said]
        if not failures:
            return self.path
        folder = self.path.parent
        if failures[0].full:
            raise disk_full(f"a checkpoint under {folder}", when_full(folder))
        raise CheckpointError(f"a checkpoint could not be written under {folder}: {failures[0].text}")

    def abandon(self, seconds: float) -> None:
        """Waits so long for the commit, then gives up. For a process that ends with an error: others may be gone."""
        wait([self._work], seconds)
        self._abandoned.set()
        wait([self._work], 1.0)

    def _write(self) -> None:
        files: dict[str, dict[str, Any]] = {}
        failure: _Failure | None = UNEXPECTED
        try:
            self._temporary.mkdir(parents=True, exist_ok=True)
            for name, tensors in self._contents.tensors.items():
                files[name] = _write_tensors(self._temporary / name, tensors)
            for name, text in self._contents.texts.items():
                files[name] = _write_text(self._temporary / name, text)
            failure = None
        except (OSError, SafetensorError) as error:
            failure = _Failure(is_disk_full(error), str(error))
        finally:  # also after a defect, which `finish` raises in its process
            self._store.set(self._parts[self._world.rank], messages.encode((files, failure)))
            if self._world.is_main_process:
                self._commit_when_all_are_written()

    def _commit_when_all_are_written(self) -> None:
        pause, end = 0.001, time.monotonic() + TIMEOUT.total_seconds()
        while not self._store.check(self._parts):
            if self._abandoned.wait(pause) or time.monotonic() > end:
                self._conclude([_Failure(False, "a process has not written its files")])
                return
            pause = min(0.5, pause * 1.5)
        try:
            parts = [
                messages.read(self._store.get(key), f"process {rank}", f"its files of {self.path}")
                for rank, key in enumerate(self._parts)
            ]
            failures = [_Failure(*failure) for _, failure in parts if failure is not None]
        except CdrmixError as error:
            self._conclude([_Failure(False, str(error))])
            return
        for key in self._parts if self._world.size > 1 else ():
            self._store.delete_key(key)
        if failures:
            self._conclude(failures)
            return
        failures = [UNEXPECTED]
        try:
            self._commit({name: entry for files, _ in parts for name, entry in files.items()})
            failures = []
        except OSError as error:
            failures = [_Failure(is_disk_full(error), str(error))]
        finally:
            self._conclude(failures)

    def _conclude(self, failures: list[_Failure]) -> None:
        if failures:
            shutil.rmtree(self._temporary, ignore_errors=True)
        self._store.set(self._outcome, messages.encode(failures))

    def _commit(self, files: dict[str, dict[str, Any]]) -> None:
        folder = self.path.parent
        _write_text(self._temporary / MANIFEST, json.dumps(self._manifest | {"files": files}, indent=2) + "\n")
        sync_folder(self._temporary)
        if self.path.exists():  # it was corrupt, or is of the same step before a restart
            shutil.rmtree(set_aside(self.path))
        self._temporary.rename(self.path)
        sync_folder(folder)
        for pointer in self._pointers:
            write_atomically(folder / pointer, self.path.name + "\n")


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    save_file(tensors, path)
    sync_file(path)
    return _entry(path)


def _write_text(path: Path, text: str) -> dict[str, Any]:
    path.write_text(text, encoding="utf-8")
    sync_file(path)
    return _entry(path)


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
