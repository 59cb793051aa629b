"""Checkpoints that commit by rename: a checkpoint folder is complete, with a manifest of hashes, or does not exist.

checkpoints/step-00000500/
    model.safetensors            fp32 weights with all experts, gathered under every ZeRO stage; of a model with frozen
                                 parameters and a base (see Engine) only those that are trained
    ema.safetensors              their exponential moving average, if there is one
    optimizer-rank0.safetensors  ... each process's part of the optimizer's state, by parameter (optimizer_state.py)
    rng-rank0.json ...           the states of each process's random generators
    state.json                   step (also the position in the data), counters, loss scale, fingerprints, with a base
                                 its SHA-256
    config_snapshot.yaml         the resolved configuration
    manifest.json                size and SHA-256 of every other file, written last
checkpoints/latest, best         the name of a checkpoint, replaced atomically

Nothing is pickled, so reading a checkpoint runs no code from it.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.durable import disk_full, disk_guard, is_disk_full, sha256_file, sync_file, sync_folder, write_atomically
from cdrmix.errors import BaseModelError, CheckpointError, ConfigError, VocabularyError
from cdrmix.inference.checkpoints import (
    AVERAGE,
    FORMAT,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    optimizer_files,
    read_tensors,
    state_dict_mismatch,
)
from cdrmix.run_folder import RunFolder, check_text
from cdrmix.training.distributed import DistributedContext
from cdrmix.training.engine import Engine
from cdrmix.training.retention import Rules, prune, set_aside

WHEN_FULL = (
    "The checkpoints already there are whole. Free some space or lower train.keep_last, then continue with "
    "--resume auto."
)


@dataclass(frozen=True)
class Progress:
    """The progress of a run. `step` counts finished optimizer steps; the next global batch has that number.

    tokens: tokens with a target trained on. seconds: training time. loss: nats per token. best_value: of
    train.best_metric at best_step. unvalidated: the StepRecord of this step, if a signal came before its validation;
    the resumed run validates first. phase: of stage B, whose steps continue the count of stage A; None in stage A.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")
    skipped_steps: int = 0
    valid_bits_per_byte: float | None = None
    best_value: float | None = None
    best_step: int | None = None
    unvalidated: dict[str, Any] | None = None
    phase: str | None = None


class Fingerprints(NamedTuple):
    """Fingerprints of the tokenizer and of the shards that a run is trained on."""

    tokenizer: str
    text: str


def save_checkpoint(
    engine: Engine,
    folder: Path,
    progress: Progress,
    config: Config,
    fingerprints: Fingerprints,
    *,
    periodic: bool = True,
) -> Path:
    """Writes `folder`/step-NNNNNNNN, then points `latest` to it, and `best` if it is the best. Returns the path.

    Every rank calls.

    periodic: whether the checkpoint counts for `train.keep_last`.
    Raises DiskFullError or CheckpointError in every rank, after removing what was written. Older checkpoints stay.
    """
    world = engine.world
    final = folder / f"step-{progress.step:08d}"
    temporary = folder / f"{final.name}.tmp-{world.gather(os.getpid())[0]}"
    entries: dict[str, dict[str, Any]] = {}
    # Collected before anything is written: with ZeRO-3 and expert parallelism this is collective, and an error of one
    # rank while writing must not stop it.
    weights, average, optimizer = engine.weights(), engine.average_weights(), engine.optimizer_state()

    def write() -> None:
        temporary.mkdir(parents=True, exist_ok=True)
        if world.is_main_process:
            entries[MODEL] = _write_tensors(temporary / MODEL, weights)
            if average:
                entries[AVERAGE] = _write_tensors(temporary / AVERAGE, average)
            state = _state(engine, progress, config, fingerprints)
            entries["state.json"] = _write_text(temporary / "state.json", json.dumps(state, indent=2) + "\n")
            entries["config_snapshot.yaml"] = _write_text(temporary / "config_snapshot.yaml", config.to_yaml())
        if optimizer or world.is_main_process:
            name = f"{OPTIMIZER}-rank{world.rank}.safetensors"
            entries[name] = _write_tensors(temporary / name, optimizer)
        name = f"rng-rank{world.rank}.json"
        entries[name] = _write_text(temporary / name, json.dumps(_random_state(world)) + "\n")

    def commit() -> None:
        if not world.is_main_process:
            return
        manifest = {"format": FORMAT, "step": progress.step, "periodic": periodic, "files": files}
        _write_text(temporary / MANIFEST, json.dumps(manifest, indent=2) + "\n")
        sync_folder(temporary)
        if final.exists():  # it was corrupt, or is of the same step before a restart
            shutil.rmtree(set_aside(final))
        temporary.rename(final)
        sync_folder(folder)
        point(folder, "latest", final)
        if progress.best_step == progress.step:
            point(folder, "best", final)

    _together(world, write, temporary, folder)
    files = {name: entry for part in world.gather(entries) for name, entry in part.items()}
    _together(world, commit, temporary, folder)
    return final


class Mirroring(Protocol):
    """Copies checkpoints to a second store in the background."""

    def committed(self, checkpoint: Path) -> None:
        """A checkpoint was committed. Removes those that no rule keeps, except one that is being copied."""


class Saver:
    """Writes the checkpoints of a run: periodic, best and last. `latest` is the newest one.

    mirror: copies what is committed to a second store; None: no mirror, or not the first process.
    """

    def __init__(
        self,
        engine: Engine,
        config: Config,
        run: RunFolder,
        shards: Fingerprints,
        latest: Path | None,
        mirror: Mirroring | None = None,
    ) -> None:
        self._engine, self._config, self._run, self._shards = engine, config, run, shards
        self.latest, self._mirror = latest, mirror

    def save(self, progress: Progress, *, periodic: bool) -> None:
        """Commits a checkpoint, then removes those that `train.keep_last` and `keep_every` do not keep."""
        folder = self._run.checkpoints
        self.latest = save_checkpoint(self._engine, folder, progress, self._config, self._shards, periodic=periodic)
        if self._engine.world.is_main_process:
            if self._mirror is None:
                prune(folder, Rules.of(self._config.train), self.latest)
            else:
                self._mirror.committed(self.latest)
        self._run.note(f"checkpoint {self.latest.name}{' (best)' if progress.best_step == progress.step else ''}")
        self._engine.world.barrier()

    def point_best(self, progress: Progress) -> None:
        """Makes the `best` pointer name the best checkpoint of the progress."""
        if self._engine.world.is_main_process:
            restore_best(self._run.checkpoints, progress)
        self._engine.world.barrier()


def load_checkpoint(engine: Engine, checkpoint: Path, config: Config, fingerprints: Fingerprints) -> Progress:
    """Loads a checkpoint into the engine and the random generators. Every rank calls.

    checkpoint: verified, as `newest_whole_checkpoint` returns it.
    The number of processes, the ZeRO stage and the expert parallelism may be others than those that wrote it.
    Raises ConfigError, VocabularyError or ShardError for another configuration, tokenizer or text; CheckpointError
    when the checkpoint does not fit the model.
    """
    world = engine.world
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    # A tokenizer that is trained on the text changes with the text, which check_text reports.
    if state["tokenizer"] != fingerprints.tokenizer and config.data.tokenizer.path is not None:
        raise VocabularyError(
            f"{checkpoint} was trained with the tokenizer {state['tokenizer'][:12]}, the shards were made with "
            f"{fingerprints.tokenizer[:12]}: the file at data.tokenizer.path has changed since this run began; "
            "restore the former file, or start a new run"
        )
    check_text(state["text"], fingerprints.text, checkpoint)
    if state["config_hash"] != config.hash():
        raise ConfigError(
            f"{checkpoint} was made by configuration {state['config_hash'][:8]}, this one is "
            f"{config.hash()[:8]}; resume with --config {checkpoint / 'config_snapshot.yaml'}"
        )
    if state.get("base") != engine.base:
        raise BaseModelError(
            f"{checkpoint} {_of_base(state.get('base'))}, and this run {_of_base(engine.base)}: the model at "
            "model.path has changed since this run began; restore it, or start a new run"
        )
    weights = read_tensors(checkpoint / MODEL) if world.is_main_process else {}
    problem = world.gather(state_dict_mismatch(weights, engine.shapes()) if world.is_main_process else None)[0]
    if problem is not None:
        raise CheckpointError(f"{checkpoint} does not fit the model: it {problem}")
    engine.load_weights(weights)
    if engine.average is not None:
        engine.load_average_weights(read_tensors(checkpoint / AVERAGE))
    engine.load_optimizer_state(checkpoint, optimizer_files(checkpoint))
    engine.loss_scale.load(state["loss_scale"])
    generators = checkpoint / f"rng-rank{world.rank}.json"
    if generators.exists():  # an additional process keeps its new generators
        _set_random_state(json.loads(generators.read_text(encoding="utf-8")), world)
    return _progress(state)


def read_progress(checkpoint: Path) -> Progress:
    """The progress of a run at a checkpoint."""
    return _progress(json.loads((checkpoint / "state.json").read_text(encoding="utf-8")))


def _progress(state: dict[str, Any]) -> Progress:
    fields = dict(state["progress"])
    if "best_bits_per_byte" in fields:  # of a run before train.best_metric existed
        fields["best_value"] = fields.pop("best_bits_per_byte")
    return Progress(**fields)


def differences(checkpoint: Path, engine: Engine) -> list[str]:
    """Differences from the processes that wrote a checkpoint, as far as they change the rounding."""
    state = {"expert_parallel": 1} | json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    now = _layout(engine)
    return [
        f"{name}: {state[name]} before, {count} now" for name, count in now.items() if state.get(name, count) != count
    ]


def _layout(engine: Engine) -> dict[str, int]:
    layout = {"processes": engine.world.size, "zero_stage": engine.stage, "expert_parallel": engine.expert_parallel}
    return layout if engine.any_threads else layout | {"threads": torch.get_num_threads()}


def restore_best(folder: Path, progress: Progress) -> None:
    """Makes the `best` pointer name the best checkpoint of `progress`, or removes it where there is none.

    The two differ after a kill between a checkpoint and its pointer, and when the best checkpoint was corrupt.
    """
    best = None if progress.best_step is None else folder / f"step-{progress.best_step:08d}"
    if best is not None and best.is_dir():
        point(folder, "best", best)
    else:
        (folder / "best").unlink(missing_ok=True)


def point(folder: Path, name: str, checkpoint: Path) -> None:
    """Writes the name of a checkpoint to the pointer file `folder`/`name`, atomically. Raises DiskFullError."""
    with disk_guard(f"a checkpoint under {folder}", WHEN_FULL):
        write_atomically(folder / name, checkpoint.name + "\n")


def _together(world: DistributedContext, action: Callable[[], None], temporary: Path, folder: Path) -> None:
    # All ranks act, then all learn whether one failed, so that no rank waits for a failed one.
    failure: tuple[bool, str] | None = None
    try:
        action()
    except (OSError, SafetensorError) as error:
        failure = (is_disk_full(error), str(error))
    failures = [other for other in world.gather(failure) if other is not None]
    if not failures:
        return
    if world.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
    world.barrier()
    full, text = failures[0]
    if full:
        raise disk_full(f"a checkpoint under {folder}", WHEN_FULL)
    raise CheckpointError(f"a checkpoint could not be written under {folder}: {text}")


def _state(engine: Engine, progress: Progress, config: Config, fingerprints: Fingerprints) -> dict[str, Any]:
    return {
        "progress": dataclasses.asdict(progress),
        "config_hash": config.hash(),
        **fingerprints._asdict(),
        **_layout(engine),
        "loss_scale": engine.loss_scale.state(),
    } | ({} if engine.base is None else {"base": engine.base})


def _of_base(base: str | None) -> str:
    return "has no base model" if base is None else f"has a base model with SHA-256 {base[:12]}"


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


def _random_state(world: DistributedContext) -> dict[str, Any]:
    name, keys, position, has_gauss, cached_gaussian = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached_gaussian],
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state(world.device)) if world.device.type == "cuda" else None,
    }


def _set_random_state(state: dict[str, Any], world: DistributedContext) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numpy_keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(numpy_keys, dtype=np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(_bytes(state["torch"]))
    if world.device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(_bytes(state["cuda"]), world.device)


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
