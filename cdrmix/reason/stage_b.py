"""Stage B: the phases that teach a trained model fast weights, decisions and memory.

Each phase is an objective of the trainer. It uses the run folder and the checkpoints of stage A, and counts steps after
those of stage A. Each phase has its own optimizer. The randomness of a step is seeded by the step, so a run that was
killed continues from its newest checkpoint with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.config.schema_reasoning import Phase as PhaseSection
from cdrmix.data.loader import TrainLoader, train_loader
from cdrmix.data.shards import ShardSet
from cdrmix.errors import CheckpointError, ConfigError
from cdrmix.inference.checkpoints import (
    MODEL,
    file_name,
    has_average,
    newest_whole_checkpoint,
    read_weights,
    state_dict_mismatch,
)
from cdrmix.inference.load import HEADS, backbone_weights
from cdrmix.inference.rwkv_files import check_model, is_weights_file
from cdrmix.reason.agent.policy import PolicyPhase
from cdrmix.reason.build import build_model, make_phase
from cdrmix.reason.joint import parts_of
from cdrmix.reason.phase import Phase, PhaseObjective, freeze, phase_config, reasoning_of
from cdrmix.reason.sources import check_episodes
from cdrmix.run_folder import RunFolder
from cdrmix.runtime import free_memory, seed_everything
from cdrmix.training.callbacks import Callback
from cdrmix.training.checkpoint import Mirroring, Progress, Saver, load_checkpoint, read_progress
from cdrmix.training.console import PhaseConsole
from cdrmix.training.digests import make_digest_file
from cdrmix.training.distributed import DistributedContext, join
from cdrmix.training.engine import Engine, make_engine
from cdrmix.training.faults import memory_guard
from cdrmix.training.stage_a import fingerprints
from cdrmix.training.threads import ThreadChoice
from cdrmix.training.trackers import Trackers
from cdrmix.training.trainer import Trainer
from cdrmix.training.watchdog import make_watchdog
from cdrmix.training.zero import zero_stage


class Span(NamedTuple):
    """The steps of a phase in the run: `first` steps are finished when it begins, `last` when it ends."""

    name: str
    section: PhaseSection
    first: int
    last: int


class StageBResult(NamedTuple):
    """The result of a finished stage B. seconds: training time, stage A's included."""

    step: int
    seconds: float
    checkpoint: Path


def spans(config: Config) -> list[Span]:
    """The phases that have steps, in their order."""
    assert config.reasoning is not None
    phases, step = [], 0 if config.reasoning.backbone else config.train.steps
    for name, section in config.reasoning.phases:
        if section.steps:
            phases.append(Span(name, section, step, step + section.steps))
            step += section.steps
    return phases


def check_stage_b(config: Config, processes: int = 1) -> None:
    """Checks stage B before training. Raises ConfigError for a missing backbone, one of another model, for impossible
    episodes, and for episodes that cannot be divided among the processes; CheckpointError for a file without a whole
    model."""
    assert config.reasoning is not None
    for name, section in config.reasoning.phases:
        if not section.steps or name == "joint":  # which has the episodes of other phases
            continue
        if section.episodes % processes and name in ("acceptance", "policy", "operations"):
            raise ConfigError(
                f"reasoning.phases.{name}.episodes is {section.episodes}; it must be a multiple of the {processes} "
                "processes (--nproc), since each makes the rollouts of as many"
            )
        if section.episodes < processes:
            raise ConfigError(
                f"reasoning.phases.{name}.episodes is {section.episodes}; each of the {processes} processes (--nproc) "
                "needs one"
            )
    stage, imitation = zero_stage(config.train, processes), config.reasoning.phases.operations_imitation
    together = processes > 1 and (stage == 3 or config.train.expert_parallel > 1)
    if together and imitation.steps and imitation.train == "own" and imitation.summarised:
        # Only a process whose windows have summaries in front goes back through the language model.
        raise ConfigError(
            "reasoning.phases.operations_imitation.train is own and summarised is above 0, which under ZeRO-3 and with "
            "train.expert_parallel several processes cannot do together; set train to all, or summarised to 0"
        )
    divided = config.train.expert_parallel > 1 and stage in (1, 2)
    for name, section in config.reasoning.phases if divided else ():
        own = name in ("plasticity", "operations", "operations_imitation") and section.train == "own"
        if section.steps and (own or name == "acceptance"):
            raise ConfigError(
                f"train.expert_parallel: phase {name} trains no expert, which DeepSpeed refuses at ZeRO stages 1 and "
                "2; set train.zero_stage to 0 or 3"
            )
    backbone = config.reasoning.backbone and Path(config.reasoning.backbone).expanduser()
    if backbone and not backbone.exists():
        allowed = "a run, a checkpoint, an export, or a file of RWKV-7 weights"
        raise ConfigError(f"reasoning.backbone={backbone} does not exist; name {allowed}")
    if backbone and is_weights_file(backbone):
        check_model(config, backbone)
    check_episodes(config)


def train_stage_b(
    config: Config,
    run: RunFolder,
    shards: ShardSet,
    *,
    console: bool = True,
    callbacks: Sequence[Callback] = (),
    mirror: Mirroring | None = None,
) -> StageBResult:
    """Trains every phase that is not done yet, from the run's newest whole checkpoint. Every process calls it.

    Raises what stage A's `train` raises; CheckpointError for a backbone, or a checkpoint, of other sizes.
    """
    world = join(config)
    with memory_guard(config, in_rows=False):
        progress, weights, newest = _start(config, run, world)
        for span in spans(config):
            if progress.step >= span.last:
                continue
            progress, weights, newest = _train_phase(
                config,
                run,
                shards,
                world,
                span,
                progress,
                weights,
                newest,
                console=console,
                callbacks=callbacks,
                mirror=mirror,
            )
    assert newest is not None
    return StageBResult(progress.step, progress.seconds, newest)


def _start(
    config: Config, run: RunFolder, world: DistributedContext
) -> tuple[Progress, dict[str, Tensor], Path | None]:
    """The progress and the checkpoint from which to continue, and in rank 0 its weights.

    The weights of stage A's last checkpoint are the running average if it has one, as in its export.
    """
    assert config.reasoning is not None
    found = newest_whole_checkpoint(run.checkpoints, run.say) if world.is_main_process else None
    newest = world.gather(found, "the choice of a checkpoint")[0]
    if newest is not None:
        weights = read_weights(newest, average=has_average(newest)) if world.is_main_process else {}
        return read_progress(newest), weights, newest
    if not config.reasoning.backbone:
        raise CheckpointError(f"{run.checkpoints} has no complete checkpoint of stage A, which stage B starts from")
    weights = {}
    if world.is_main_process:
        weights = backbone_weights(Path(config.reasoning.backbone).expanduser(), config, run.tokenizer)
    return Progress(), weights, None


def _train_phase(
    config: Config,
    run: RunFolder,
    shards: ShardSet,
    world: DistributedContext,
    span: Span,
    progress: Progress,
    weights: dict[str, Tensor],
    newest: Path | None,
    *,
    console: bool,
    callbacks: Sequence[Callback],
    mirror: Mirroring | None,
) -> tuple[Progress, dict[str, Tensor], Path]:
    """One phase to its end. Returns the progress, rank 0's weights and the last checkpoint."""
    free_memory()
    of_phase = phase_config(config, span.section)
    seed_everything(config.run.seed)  # the same in every process: all build the same weights
    model = build_model(config)

    def text() -> TrainLoader:
        loader = train_loader(config, shards.train, world.rank, world.size)
        loader.passed_over = progress.passed_over
        return loader

    phase = make_phase(span.name, config, shards.tokenizer, text)
    freeze(model, phase)
    gathers = zero_stage(config.train, world.size) == 3
    copy = None
    if gathers and phase.rolls_out and reasoning_of(config).rollout_weights == "copied":
        with torch.random.fork_rng(devices=[]):
            copy = build_model(config, whole=True).to(world.device)
    needs_others = gathers or config.train.expert_parallel > 1
    objective = PhaseObjective(phase, model, world, needs_others=needs_others, copy=copy)
    engine = make_engine(of_phase, model, world)
    if progress.step > span.first:
        assert newest is not None
        progress = load_checkpoint(engine, newest, config, fingerprints(shards))
        run.say(f"{span.name}: continues after step {progress.step} ({newest.name})")
    else:
        _begin(engine, weights, newest, world)
    run.drop_metrics_after(progress.step)
    run.drop_records_after(progress.step)
    saver = Saver(engine, config, run, fingerprints(shards), latest=newest, mirror=mirror)
    with (
        Trackers(run, config) as trackers,
        PhaseConsole(run, span.name, span.section.steps, shown=console) as screen,
    ):
        progress = Trainer(
            of_phase.train,
            engine,
            objective,
            ThreadChoice([torch.get_num_threads()], run.say),
            progress=progress,
            first_step=span.first,
            saver=saver,
            callbacks=[trackers, screen, _Rollouts(run, phase), *callbacks],
            watchdog=make_watchdog(config, run, world),
            on_skip=run.record_skip,
            digests=make_digest_file(config, run, engine.trained),
            say=run.say,
        ).fit()
    assert saver.latest is not None
    return progress, engine.weights(), saver.latest


class _Rollouts(Callback):
    """Appends the rollouts that a phase shows of a step to rollouts.jsonl."""

    def __init__(self, run: RunFolder, phase: Phase) -> None:
        self._run, self._phases = run, [part for part in parts_of(phase) if isinstance(part, PolicyPhase)]

    def on_step(self, step: int) -> None:
        """Writes those of the step."""
        for phase in self._phases:
            self._run.add_rollouts([{"step": step, **rollout._asdict()} for rollout in phase.shown])
            phase.shown = []


def _begin(engine: Engine, weights: dict[str, Tensor], origin: Path | None, world: DistributedContext) -> None:
    """Gives an engine the weights that a phase begins with; adapters and heads that are not there yet are new."""
    problem, fresh = None, engine.weights(wanted=is_new)
    if world.is_main_process:
        new = {name: tensor for name, tensor in fresh.items() if name not in weights}
        other = {name for name in weights if is_new(name) and name not in fresh}  # heads that no phase here wants
        weights = {name: tensor for name, tensor in (weights | new).items() if name not in other}
        problem = state_dict_mismatch(weights, engine.shapes())
    problem = world.gather(problem, "the weights to start from")[0]
    if problem is not None:
        where = origin / file_name(MODEL) if origin is not None else "reasoning.backbone"
        raise CheckpointError(f"{where} does not fit this configuration's model: it {problem}")
    engine.load_weights(weights)


def is_new(name: str) -> bool:
    """Whether a parameter is one that stage B adds to a language model: of an adapter or a head."""
    return ".plastic." in name or name.split(".")[0] in HEADS
