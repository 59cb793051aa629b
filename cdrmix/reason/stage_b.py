"""Stage B: the phases that teach a trained backbone to write to itself, to decide, and to remember.

One loop for all of them, on stage A's engine, checkpoints and run folder. Steps go on counting where stage A ended.
Each phase has an optimizer of its own, whose parameters it says; what is random in a step is seeded by the step, so a
run that was killed goes on bit for bit from its newest checkpoint.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.config.schema_reasoning import Phase as PhaseSection
from cdrmix.data.shards import ShardSet
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import CheckpointError, ConfigError, Preempted
from cdrmix.inference.checkpoints import MODEL, newest_whole_checkpoint, read_weights, state_dict_mismatch
from cdrmix.inference.load import HEADS, backbone_weights
from cdrmix.reason.build import build_model, make_phase
from cdrmix.reason.episodes import check_episodes
from cdrmix.reason.model import Loss, PhaseLoss, StageBModel
from cdrmix.reason.phase import Phase, train_section
from cdrmix.run_folder import RunFolder
from cdrmix.runtime import seed_everything
from cdrmix.training.checkpoint import Progress, load_checkpoint, read_progress
from cdrmix.training.distributed import DistributedContext, join
from cdrmix.training.engine import Engine, make_engine
from cdrmix.training.faults import StopRequest, check_finite, memory_guard
from cdrmix.training.metrics import PhaseConsole, PhaseRecord, Trackers
from cdrmix.training.schedule import learning_rate
from cdrmix.training.stage_a import Saver, fingerprints, memory_gib
from cdrmix.training.zero import zero_stage


class Span(NamedTuple):
    """A phase's place in the run: `first` steps were finished when it begins, `last` when it ends."""

    name: str
    section: PhaseSection
    first: int
    last: int


class StageBResult(NamedTuple):
    """What a finished stage B reports. seconds: of training, stage A's included."""

    step: int
    seconds: float
    checkpoint: Path


def spans(config: Config) -> list[Span]:
    """The phases that have steps, in their order."""
    assert config.reasoning is not None
    found, step = [], 0 if config.reasoning.backbone else config.train.steps
    for name, section in config.reasoning.phases:
        if section.steps:
            found.append(Span(name, section, step, step + section.steps))
            step += section.steps
    return found


def check_stage_b(config: Config) -> None:
    """Raises ConfigError, before anything is done, for a backbone that is not there and impossible episodes."""
    assert config.reasoning is not None
    backbone = config.reasoning.backbone
    if backbone and not Path(backbone).exists():
        raise ConfigError(f"reasoning.backbone={backbone} does not exist; name a run, a checkpoint or an export")
    check_episodes(config)


def train_stage_b(config: Config, run: RunFolder, shards: ShardSet, *, console: bool = True) -> StageBResult:
    """Trains every phase that is not done yet, from the run's newest whole checkpoint. Every process calls it.

    Raises what stage A's `train` raises; CheckpointError for a backbone, or a checkpoint, of other sizes.
    """
    world = join(config)
    with memory_guard(config):
        progress, weights, newest = _start(config, run, world)
        for span in spans(config):
            if progress.step >= span.last:
                continue
            progress, weights, newest = _train_phase(
                config, run, shards, world, span, progress, weights, newest, console=console
            )
    assert newest is not None
    return StageBResult(progress.step, progress.seconds, newest)


def _start(
    config: Config, run: RunFolder, world: DistributedContext
) -> tuple[Progress, dict[str, Tensor], Path | None]:
    """Where to go on, and in rank 0 the weights to begin with: stage A's, or those of the newest checkpoint."""
    assert config.reasoning is not None
    newest = world.gather(newest_whole_checkpoint(run.checkpoints, run.say) if world.is_main_process else None)[0]
    if newest is not None:
        weights = read_weights(newest) if world.is_main_process else {}
        return read_progress(newest), weights, newest
    if not config.reasoning.backbone:
        raise CheckpointError(f"{run.checkpoints} holds no whole checkpoint of stage A to begin stage B with")
    weights = {}
    if world.is_main_process:
        weights = backbone_weights(Path(config.reasoning.backbone), config, run.tokenizer)
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
) -> tuple[Progress, dict[str, Tensor], Path]:
    """One phase to its end. Returns the progress, rank 0's weights and the last checkpoint."""
    of_phase = phase_config(config, span)
    seed_everything(config.run.seed)  # the same in every process: all build the same weights
    model = build_model(config)
    tokenizer = TextTokenizer.load(shards.tokenizer_path, config.data.tokenizer.end_of_text)
    phase = make_phase(span.name, config, tokenizer, shards, world)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(phase.trains(name))
    fresh = {name.removeprefix("language_model."): tensor.clone() for name, tensor in model.state_dict().items()}
    # Under ZeRO-3 rollouts are made by a copy, in which every process has all weights.
    rolled = copy.deepcopy(model).to(world.device) if zero_stage(config.train, world.size) == 3 else model
    engine = make_engine(of_phase, model, world)
    if progress.step > span.first:
        assert newest is not None
        progress = load_checkpoint(engine, newest, config, fingerprints(shards))
        run.say(f"{span.name}: going on behind step {progress.step} ({newest.name})")
    else:
        _begin(engine, weights, fresh, newest, world)
    run.drop_metrics_after(progress.step)
    saver = Saver(engine, config, run, fingerprints(shards), latest=newest)
    with (
        StopRequest() as stop,
        Trackers(run, config) as trackers,
        PhaseConsole(run, span.name, span.section.steps, shown=console) as screen,
    ):
        for step in range(progress.step - span.first, span.section.steps):
            number = span.first + step + 1
            started = time.perf_counter()
            rate = learning_rate(of_phase.train, step)
            engine.set_learning_rate(rate)
            total, sums = _step(engine, model, rolled, phase, step, number)
            progress = dataclasses.replace(
                progress,
                step=number,
                phase=span.name,
                loss=total,
                seconds=progress.seconds + time.perf_counter() - started,
            )
            stopping = world.any(stop.requested)
            last = step + 1 == span.section.steps
            if (step + 1) % config.train.log_every == 0 or step == 0 or last:
                measures = phase.record(dict(zip(phase.measures, sums, strict=True)))
                record = PhaseRecord(
                    number, span.name, step + 1, total, rate, engine.gradient_norm, progress.seconds,
                    memory_gib(world), measures,
                )  # fmt: skip
                trackers.write(record)
                screen.update(record)
            if last or stopping or number % config.train.checkpoint_every == 0:
                saver.save(progress, periodic=True)
            if stopping:
                raise Preempted(
                    f"stopped by a signal in phase {span.name}, after step {step + 1} of {span.section.steps}; "
                    f"{saver.latest} is whole, continue with --resume auto"
                )
    assert saver.latest is not None
    return progress, engine.weights(), saver.latest


def _step(
    engine: Engine, model: StageBModel, rolled: StageBModel, phase: Phase, step: int, number: int
) -> tuple[float, list[float]]:
    """One optimizer step. Returns the global loss and the sums of the phase's measures, the same in every process.

    rolled: the model that rolls out, `model` itself or a copy of it.
    """
    world = engine.world
    if rolled is not model:
        engine.copy_weights(rolled)
    rolled.eval()  # what is rolled out is not training: nothing is dropped, nothing jittered
    with engine.module.precision():
        losses = phase.losses(rolled, step, world.rank, world.size)
    rolled.train()
    if rolled is not model:  # what a phase has set besides by gradients
        for ours, theirs in zip(model.buffers(), rolled.buffers(), strict=True):
            ours.copy_(theirs)
    losses = _evened(losses, world)
    figures = torch.zeros(1 + len(phase.measures), dtype=torch.float64, device=world.device)
    for place, loss in enumerate(losses):
        outcome: PhaseLoss = engine.evaluate(loss, last=place + 1 == len(losses))
        engine.backward(outcome.total)
        figures[0] += outcome.total.detach().double()
        figures[1:] += outcome.sums.detach().double()
    total, *sums = world.total(figures).tolist()
    check_finite(total, number)
    engine.clip()
    engine.step()
    engine.zero()
    return total, sums


def _evened(losses: list[Loss], world: DistributedContext) -> list[Loss]:
    """As many micro-batches in every process, since gradients are reduced together: the last one again, for nothing."""
    assert losses, "a phase gives every process at least one micro-batch"
    again, last = max(world.gather(len(losses))) - len(losses), losses[-1]

    def nothing(model: StageBModel) -> PhaseLoss:
        outcome = last(model)
        return PhaseLoss(0.0 * outcome.total, torch.zeros_like(outcome.sums))

    return losses + [nothing] * again


def phase_config(config: Config, span: Span) -> Config:
    """The configuration that a phase's engine sees: its own rates and steps in the place of stage A's."""
    train = train_section(config.train, span.section)
    # A phase makes its micro-batches itself; DeepSpeed wants numbers that go together.
    rows = max(1, config.train.batch_rows // config.train.micro_batch_rows)
    train = train.model_copy(update={"batch_rows": rows, "micro_batch_rows": 1})
    return config.model_copy(update={"train": train})


def _begin(
    engine: Engine, weights: dict[str, Tensor], fresh: dict[str, Tensor], origin: Path | None, world: DistributedContext
) -> None:
    """Gives an engine the weights that a phase begins with; adapters and heads that are not there yet are new."""
    problem = None
    if world.is_main_process:
        new = {name: tensor for name, tensor in fresh.items() if is_new(name) and name not in weights}
        other = {name for name in weights if is_new(name) and name not in fresh}  # heads that no phase here wants
        weights = {name: tensor for name, tensor in (weights | new).items() if name not in other}
        problem = state_dict_mismatch(weights, engine.shapes())
    problem = world.gather(problem)[0]
    if problem is not None:
        where = origin / MODEL if origin is not None else "reasoning.backbone"
        raise CheckpointError(f"{where} does not fit this configuration's model: it {problem}")
    engine.load_weights(weights)


def is_new(name: str) -> bool:
    """Whether a parameter is one that stage B adds to a language model: of an adapter or a head."""
    return ".plastic." in name or name.split(".")[0] in HEADS
