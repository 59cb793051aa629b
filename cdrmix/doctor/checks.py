"""The checks of one process, in their order; what repeats, resumes, is read back and is written."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cdrmix.compare import compare
from cdrmix.config.schema import Config
from cdrmix.data.prepare import prepare
from cdrmix.data.shards import ShardSet
from cdrmix.doctor.findings import Finding, configuration
from cdrmix.doctor.gradients import engine, kernels
from cdrmix.inference.checkpoints import damages, list_checkpoints
from cdrmix.run_folder import RunFolder, environment
from cdrmix.training.callbacks import Callback
from cdrmix.training.stage_a import train

DISK_BYTES = 1 << 28


class _BrokenOff(Exception):
    """Stands for a process that ends after a checkpoint."""


class _BreakOff(Callback):
    def on_checkpoint(self, checkpoint: Path) -> None:
        raise _BrokenOff


def checks(folder: Path, device: str) -> Iterator[Callable[[], Finding]]:
    """The checks in their order. folder: where a run would write; nothing is left there."""
    yield _packages
    with tempfile.TemporaryDirectory(prefix="cdrmix-doctor-") as temporary:
        config = configuration(Path(temporary), device)
        with contextlib.redirect_stdout(io.StringIO()):
            shards = prepare(config, say=lambda text: None)
        yield lambda: kernels(config, shards)
        yield lambda: engine("engine against PyTorch", config, config, shards)
        runs: list[RunFolder] = []
        yield lambda: _repetition(config, shards, runs)
        yield lambda: _resuming(config, shards, runs)
        yield lambda: _checkpoint(runs)
    yield lambda: _disk(folder)


def _packages() -> Finding:
    versions = environment()["versions"]
    missing = [name for name, version in versions.items() if version == "not installed"]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if name not in missing)
    remedy = f"install {', '.join(missing)}: make install, or pip with constraints.txt"
    return Finding("packages", not missing, found, remedy if missing else "")


def _train(config: Config, shards: ShardSet, run: RunFolder, resume: str | None = None, *more: Callback) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        train(config, run, shards, resume=resume, console=False, callbacks=more)


def _repetition(config: Config, shards: ShardSet, runs: list[RunFolder]) -> Finding:
    for _ in range(2):
        runs.append(RunFolder.create(config))
        _train(config, shards, runs[-1])
    return _identical("a training repeated", runs[0], runs[1], config)


def _resuming(config: Config, shards: ShardSet, runs: list[RunFolder]) -> Finding:
    runs.append(RunFolder.create(config))
    with contextlib.suppress(_BrokenOff):
        _train(config, shards, runs[-1], None, _BreakOff())
    _train(config, shards, runs[-1], "auto")
    return _identical("a training resumed", runs[0], runs[-1], config)


def _identical(check: str, one: RunFolder, other: RunFolder, config: Config) -> Finding:
    compared = compare(*(list_checkpoints(run.checkpoints)[-1] for run in (one, other)))
    found = f"{config.train.steps} steps: " + ("the same bits" if compared.identical else compared.lines[1])
    remedy = "" if compared.identical else "results of this machine cannot be repeated: test its memory"
    return Finding(check, compared.identical, found, remedy)


def _checkpoint(runs: list[RunFolder]) -> Finding:
    checkpoint = list_checkpoints(runs[0].checkpoints)[-1]
    whole = damages(checkpoint)
    model = checkpoint / "model.safetensors"
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    noticed = damages(checkpoint)
    passed = not whole and len(noticed) == 1
    verified = f"{len(list(checkpoint.iterdir()))} files verified; a changed bit is noticed"
    found = verified if passed else str(whole or noticed)
    return Finding("a checkpoint", passed, found, "" if passed else "the disk gives back other bytes than were written")


def _disk(folder: Path) -> Finding:
    """Writes a file as a checkpoint is written, and hashes it."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < 2 * DISK_BYTES:
        return Finding("disk", False, f"{free / 1e9:.1f} GB free in {folder.resolve()}", "free some space")
    block = os.urandom(1 << 24)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        started = time.perf_counter()
        for _ in range(DISK_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        file.seek(0)
        expected = hashlib.sha256(block * (DISK_BYTES // len(block))).digest()
        hashed = time.perf_counter()
        same = hashlib.file_digest(file, "sha256").digest() == expected
        read = time.perf_counter()
    speeds = [DISK_BYTES / 1e9 / seconds for seconds in (written - started, hashed - written, read - hashed)]
    found = "{:.2f} GB/s written and flushed, SHA-256 {:.2f} GB/s, read and hashed {:.2f} GB/s".format(*speeds)
    return Finding(
        "disk", same, f"{found}; {free / 1e9:.0f} GB free in {folder.resolve()}", "" if same else "replace the disk"
    )
