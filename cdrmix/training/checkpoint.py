"""Checkpoints that commit by rename: a checkpoint folder is complete, with a manifest of hashes, or does not exist.

checkpoints/step-00000500/
    model.safetensors            fp32 weights with all experts; of a model with frozen parameters and a base (see
                                 Engine) only those that are trained. Under ZeRO-3 each process writes some of the
                                 tensors, and of a pipeline each stage, to model-00001-of-00008.safetensors ...
    ema.safetensors              their exponential moving average, if there is one; likewise
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
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from cdrmix.config.changes import difference
from cdrmix.config.schema import Config
from cdrmix.durable import disk_guard, write_atomically
from cdrmix.errors import BaseModelError, CheckpointError, ConfigError, VocabularyError
from cdrmix.inference.checkpoints import (
    AVERAGE,
    MODEL,
    OPTIMIZER,
    StoredWeights,
    file_name,
    list_checkpoints,
    optimizer_files,
    shapes_mismatch,
)
from cdrmix.json_text import parse_json
from cdrmix.records import step_record
from cdrmix.run_folder import RunFolder, check_text
from cdrmix.training.checkpoint_writer import CheckpointWriter, Contents, when_full
from cdrmix.training.copies import HostCopies, on_cpu
from cdrmix.training.distributed import DistributedContext
from cdrmix.training.engine import Engine
from cdrmix.training.retention import LATEST, Rules, prune, set_aside


@dataclass(frozen=True)
class Progress:
    """The progress of a run. `step` counts finished optimizer steps; the next global batch has that number.

    tokens: tokens with a target trained on. seconds: training time. loss: nats per token. best_value: of
    train.best_metric at best_step. consecutive_skips, recent_losses: of Skips, which decides by them. rollbacks: how
    often the run went back to a checkpoint; passed_over: the rows that it therefore does not train on. unvalidated: the
    StepRecord of this step, if a signal came before its validation; the resumed run validates first. phase: of stage B,
    whose steps continue the count of stage A; None in stage A.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")
    skipped_steps: int = 0
    consecutive_skips: dict[str, int] = dataclasses.field(default_factory=dict)
    recent_losses: tuple[float, ...] = ()
    rollbacks: int = 0
    passed_over: int = 0
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
    copies: HostCopies | None = None,
    *,
    periodic: bool = True,
) -> CheckpointWriter:
    """Begins to write `folder`/step-NNNNNNNN. Then `latest` will point to it, and `best` if it is the best.

    Every rank calls, and then `finish` of the result. copies: of what the training changes until then; None: nothing
    changes. periodic: whether the checkpoint counts for `train.keep_last`.
    """
    world, tensors, texts = engine.world, {}, {}
    # Under ZeRO-3 and expert parallelism these are collectives.
    part = (world.pipeline_stage, world.pipeline_parallel)  # of the weights; they are in the first rank of each stage
    if engine.stage == 3:
        part = (world.rank, world.size)
    for name, state in (
        (file_name(MODEL, *part), engine.weights_part),
        (file_name(AVERAGE, *part), engine.average_weights_part),
        (f"{OPTIMIZER}-rank{world.rank}.safetensors", engine.optimizer_state),
    ):
        tensors[name] = state(on_cpu if copies is None else copies.of(name))
    if copies is not None:
        copies.wait()
    always = (file_name(MODEL, *part), f"{OPTIMIZER}-rank0.safetensors") if world.is_main_process else ()
    tensors = {name: found for name, found in tensors.items() if found or name in always}
    texts[f"rng-rank{world.rank}.json"] = json.dumps(_random_state(world)) + "\n"
    if world.is_main_process:
        texts["state.json"] = json.dumps(_state(engine, progress, config, fingerprints), indent=2) + "\n"
        texts["config_snapshot.yaml"] = config.to_yaml()
    return CheckpointWriter(
        world,
        folder,
        Contents(tensors, texts),
        step=progress.step,
        periodic=periodic,
        best=progress.best_step == progress.step,
    )


class Store(Protocol):
    """Where checkpoints are kept, such as a RunFolder."""

    @property
    def checkpoints(self) -> Path:
        """The folder."""

    def note(self, text: str) -> None:
        """Adds a line to the log."""


class Mirroring(Protocol):
    """Copies checkpoints to a second store in the background."""

    def committed(self, checkpoint: Path) -> None:
        """A checkpoint was committed. Removes those that no rule keeps, except one that is being copied."""


class Saver:
    """Writes the checkpoints of a run: periodic, best and last. `latest` is the newest one that is committed.

    A context manager: when the body raises, a checkpoint that is being written has `PATIENCE` seconds to be committed.
    mirror: copies what is committed to a second store; None: no mirror, or not the first process.
    """

    PATIENCE = 30.0  # the launcher kills a process 60 s after another one has failed

    def __init__(
        self,
        engine: Engine,
        config: Config,
        store: Store,
        shards: Fingerprints,
        latest: Path | None,
        mirror: Mirroring | None = None,
    ) -> None:
        self._engine, self._config, self._store, self._shards = engine, config, store, shards
        self.latest, self._mirror = latest, mirror
        beside = config.train.async_checkpoints
        beside = engine.world.device.type == "cuda" if beside == "auto" else beside
        self._copies = HostCopies() if beside else None
        self._writer: CheckpointWriter | None = None
        self._best = False  # what is being written is the best checkpoint

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.abandon(self.PATIENCE)

    def save(self, progress: Progress, *, periodic: bool, wait: bool) -> list[Path]:
        """Begins a checkpoint, after the one before is committed. Returns those that were committed meanwhile.

        wait: it is committed too before this returns, as all are without train.async_checkpoints. Every rank calls.
        """
        started = time.perf_counter()
        committed = self.finish()
        self._writer = save_checkpoint(
            self._engine,
            self._store.checkpoints,
            progress,
            self._config,
            self._shards,
            self._copies,
            periodic=periodic,
        )
        self._best = progress.best_step == progress.step
        name = self._writer.path.name
        if wait or self._copies is None:
            committed += self.finish()
        self._store.note(f"the training waited {time.perf_counter() - started:.2f} s for {name}")
        return committed

    @property
    def written(self) -> bool:
        """In the first process: whether `finish` would return a checkpoint without waiting."""
        return self._engine.world.is_main_process and self._writer is not None and self._writer.written

    def finish(self) -> list[Path]:
        """Waits for the checkpoint that is being written, then removes those that `train.keep_last` and `keep_every`
        do not keep. Returns it; [] if there is none. Every rank calls.

        Raises as CheckpointWriter.finish.
        """
        if self._writer is None:
            return []
        try:
            self.latest = self._writer.finish()
        finally:
            self._writer = None
        if self._engine.world.is_main_process:
            if self._mirror is None:
                prune(self._store.checkpoints, Rules.of(self._config.train), self.latest)
            else:
                self._mirror.committed(self.latest)
        self._store.note(f"checkpoint {self.latest.name}{' (best)' if self._best else ''}")
        self._engine.world.barrier()
        return [self.latest]

    def go_back(self, checkpoint: Path) -> None:
        """Makes an older checkpoint the newest: those after it have rows and weights that the run will not have again.
        Every rank calls, while none is being written."""
        assert self._writer is None
        self.latest, folder = checkpoint, self._store.checkpoints
        if self._engine.world.is_main_process:
            for other in list_checkpoints(folder):
                if other > checkpoint:
                    shutil.rmtree(set_aside(other), ignore_errors=True)
            point(folder, LATEST, checkpoint)
            if self._mirror is not None:
                self._mirror.committed(checkpoint)
        self._engine.world.barrier()

    def point_best(self, progress: Progress) -> None:
        """Makes the `best` pointer name the best checkpoint of the progress."""
        if self._engine.world.is_main_process:
            restore_best(self._store.checkpoints, progress)
        self._engine.world.barrier()


def load_checkpoint(engine: Engine, checkpoint: Path, config: Config, fingerprints: Fingerprints) -> Progress:
    """Loads a checkpoint into the engine and the random generators. Every rank calls.

    checkpoint: verified, as `newest_whole_checkpoint` returns it.
    The layout of the processes (`_layout`) may be another than that which wrote it.
    Raises ConfigError, VocabularyError or ShardError for another configuration, tokenizer or text; CheckpointError
    when the checkpoint does not fit the model.
    """
    world = engine.world
    state = _read_state(checkpoint)
    # A tokenizer that is trained on the text changes with the text, which check_text reports.
    if state["tokenizer"] != fingerprints.tokenizer and config.data.tokenizer.path is not None:
        raise VocabularyError(
            f"{checkpoint} was trained with the tokenizer {state['tokenizer'][:12]}, the shards were made with "
            f"{fingerprints.tokenizer[:12]}: the file at data.tokenizer.path has changed since this run began; "
            "restore the former file, or start a new run"
        )
    check_text(state["text"], fingerprints.text, checkpoint)
    # Of an extended run, an older checkpoint has a former configuration, which made the same steps.
    if not RunFolder(checkpoint.parents[1], writes=False).made_by(state["config_hash"], config):
        snapshot = checkpoint / "config_snapshot.yaml"
        raise ConfigError(
            f"{checkpoint} was made by configuration {state['config_hash'][:8]}, this one is {config.hash()[:8]}; they "
            f"differ in\n{difference(snapshot, config)}\nResume with --config {snapshot}"
        )
    if state.get("base") != engine.base:
        raise BaseModelError(
            f"{checkpoint} {_of_base(state.get('base'))}, and this run {_of_base(engine.base)}: the model at "
            "model.path has changed since this run began; restore it, or start a new run"
        )
    with StoredWeights(checkpoint) as weights:
        problem = shapes_mismatch(weights.shapes(), engine.shapes())
        if problem is not None:
            raise CheckpointError(f"{checkpoint} does not fit the model: it {problem}")
        engine.load_weights(weights if world.leads else {})
    if engine.average is not None:
        with StoredWeights(checkpoint, average=True) as weights:
            engine.load_average_weights(weights)
    engine.load_optimizer_state(checkpoint, optimizer_files(checkpoint))
    engine.loss_scale.load(state["loss_scale"])
    # Processes that divide the layers must draw the same numbers: they have those of the first of them.
    generators = checkpoint / f"rng-rank{world.rank - world.rank % world.tensor_parallel}.json"
    if generators.exists():  # additional processes keep their new generators
        _set_random_state(parse_json(generators.read_text(encoding="utf-8")), world)
    return _progress(state)


def read_progress(checkpoint: Path) -> Progress:
    """The progress of a run at a checkpoint."""
    return _progress(_read_state(checkpoint))


def _read_state(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint. Raises CheckpointError if it lacks what a run is continued from."""
    path = checkpoint / "state.json"
    try:
        state = parse_json(path.read_text(encoding="utf-8"))
        texts = all(isinstance(state[name], str) for name in ("tokenizer", "text", "config_hash"))
        whole = texts and isinstance(state["loss_scale"], dict) and _progress(state).step >= 0
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read, and the run cannot be continued from it") from error
    if not whole:
        raise CheckpointError(f"{path} is not the state of a training, and the run cannot be continued from it")
    return dict(state)


def _progress(state: dict[str, Any]) -> Progress:
    fields = dict(state["progress"])
    if "best_bits_per_byte" in fields:  # of a run before train.best_metric existed
        fields["best_value"] = fields.pop("best_bits_per_byte")
    if fields.get("unvalidated") is not None:
        step_record(fields["unvalidated"])
    return Progress(**fields | {"recent_losses": tuple(fields.get("recent_losses", ()))})


def differences(checkpoint: Path, engine: Engine) -> list[str]:
    """Differences from the processes that wrote a checkpoint, as far as they change the rounding."""
    parallel = dict.fromkeys(("expert_parallel", "sequence_parallel", "tensor_parallel", "pipeline_parallel"), 1)
    state = parallel | _read_state(checkpoint)
    now = _layout(engine)
    return [
        f"{name}: {state[name]} before, {count} now" for name, count in now.items() if state.get(name, count) != count
    ]


def _layout(engine: Engine) -> dict[str, int]:
    layout = {"processes": engine.world.size, "zero_stage": engine.stage, "expert_parallel": engine.expert_parallel}
    layout |= {"sequence_parallel": engine.world.sequence_parallel, "micro_batch_rows": engine.micro_batch_rows}
    layout |= {"tensor_parallel": engine.world.tensor_parallel, "pipeline_parallel": engine.world.pipeline_parallel}
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
    with disk_guard(f"a checkpoint under {folder}", when_full(folder)):
        write_atomically(folder / name, checkpoint.name + "\n")


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
