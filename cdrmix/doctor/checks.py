"""The checks of one process: packages, kernels, engine, repetition, resuming, checkpoint, disk."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import deepcopy as copied
from pathlib import Path

import torch

from cdrmix.compare import compare
from cdrmix.config.schema import Config
from cdrmix.data.prepare import prepare
from cdrmix.data.shards import ShardSet
from cdrmix.doctor.findings import (
    ENGINE_TOLERANCE,
    Finding,
    backward,
    configuration,
    loader,
    perturb,
    relative_error,
)
from cdrmix.inference.checkpoints import damages, list_checkpoints
from cdrmix.run_folder import RunFolder, environment
from cdrmix.runtime import seed_everything
from cdrmix.training.build import build_loss_model
from cdrmix.training.callbacks import Callback
from cdrmix.training.distributed import join
from cdrmix.training.engine import make_engine
from cdrmix.training.stage_a import train

# Against float64. On a CPU float32 sums of at most 300 terms in five layers: 300 * 5 * 2^-24. On a GPU products may
# round their factors to 10 bits (TF32), 2^-11 a factor, through five layers and back.
KERNEL_TOLERANCE = {"cpu": 1e-4, "cuda": 3e-2}
DISK_BYTES = 1 << 28


class _BrokenOff(Exception):
    """Stands for a process that ends after a checkpoint."""


class _BreakOff(Callback):
    def on_checkpoint(self, checkpoint: Path) -> None:
        raise _BrokenOff


def checks(folder: Path, device: str) -> Iterator[Callable[[], Finding]]:
    """The checks in their order. folder: where a run would write; nothing is left there."""
    yield _packages
    yield lambda: _processor(device)
    with tempfile.TemporaryDirectory(prefix="cdrmix-doctor-") as temporary:
        config = configuration(Path(temporary), device)
        with contextlib.redirect_stdout(io.StringIO()):
            shards = prepare(config, say=lambda text: None)
        yield lambda: _kernels(config, shards)
        yield lambda: _engine(config, shards)
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


def _processor(device: str) -> Finding:
    facts = environment()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = f"Python {facts['python']}, {facts['cpus']} CPU cores, {memory:.0f} GiB"
    if device == "cuda":
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            found += f"; GPU {number}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return Finding("machine", True, found)


def _kernels(config: Config, shards: ShardSet) -> Finding:
    """Loss and every gradient of the model against the formulas in float64, with packed documents."""
    world = join(config)
    seed_everything(3)
    model = build_loss_model(config)
    perturb(list(model.parameters()))
    exact = copied(model).double()
    model.to(world.device)
    batches = loader(config, shards).micro_batches(0)
    errors = {"loss": abs(backward(model, batches, world.device) / backward(exact, batches, torch.device("cpu")) - 1)}
    others = dict(exact.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradient = others[name].grad
        assert gradient is not None
        errors[name] = relative_error(parameter.grad, gradient)
    worst = max(errors, key=lambda name: errors[name])
    passed = errors[worst] < KERNEL_TOLERANCE[world.device.type]
    remedy = f"the kernels of {worst} are wrong here: set CDRMIX_BACKEND=reference, and report the versions above"
    found = f"largest error {errors[worst]:.1e} of {len(errors) - 1} gradients and the loss ({worst})"
    return Finding("kernels against float64", passed, found, "" if passed else remedy)


def _engine(config: Config, shards: ShardSet) -> Finding:
    """The engine's gradients of a global batch against plain PyTorch."""
    world = join(config)
    seed_everything(3)
    model = build_loss_model(config)
    perturb(list(model.parameters()))
    plain = copied(model).to(world.device)
    engine = make_engine(config, model, world)
    batches = loader(config, shards).micro_batches(0)
    engine.set_micro_batches(len(batches))
    for batch in batches:
        engine.backward(engine.forward(batch, last=batch is batches[-1]).total)
    backward(plain, batches, world.device)
    errors = {}
    for name, parameter in plain.language_model.named_parameters():
        assert parameter.grad is not None
        errors[name] = relative_error(engine.gradient(name), parameter.grad)
    worst = max(errors, key=lambda name: errors[name])
    passed = errors[worst] < ENGINE_TOLERANCE
    remedy = "" if passed else "DeepSpeed sums gradients wrongly: install the version of constraints.txt"
    return Finding("engine against PyTorch", passed, f"largest error {errors[worst]:.1e} ({worst})", remedy)


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
    remedy = (
        "" if compared.identical else "results of this machine cannot be repeated: check its memory, and the versions"
    )
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
    found = (
        f"{len(list(checkpoint.iterdir()))} files verified; a changed bit is noticed"
        if passed
        else str(whole or noticed)
    )
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
