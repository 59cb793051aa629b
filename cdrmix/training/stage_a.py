"""Stage A: training of a model on packed rows, on the next token or on preferences."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.data.loader import EvalLoader, TrainLoader, train_loader
from cdrmix.data.pairs import PairLoader
from cdrmix.data.shards import ShardSet, Split
from cdrmix.errors import CheckpointError, VocabularyError
from cdrmix.eval.parts import PartScores
from cdrmix.eval.perplexity import evaluate, loss_model_nats
from cdrmix.inference.checkpoints import list_checkpoints, newest_whole_checkpoint
from cdrmix.model.loss import LossModule
from cdrmix.records import StepRecord
from cdrmix.run_folder import RunFolder
from cdrmix.runtime import seed_everything
from cdrmix.training.best import check_best_metric, updated_best
from cdrmix.training.build import build_loss_model
from cdrmix.training.callbacks import Callback
from cdrmix.training.checkpoint import (
    Fingerprints,
    Mirroring,
    Progress,
    Saver,
    differences,
    load_checkpoint,
    read_progress,
    restore_best,
)
from cdrmix.training.compiling import uncompiled
from cdrmix.training.console import Console
from cdrmix.training.digests import make_digest_file
from cdrmix.training.distributed import DistributedContext, join, thread_numbers
from cdrmix.training.engine import Engine, make_engine
from cdrmix.training.faults import SKIPPED, memory_guard
from cdrmix.training.objective import Outcome, StepFacts, StepTotals
from cdrmix.training.parts import PartedPretraining
from cdrmix.training.prediction_losses import PredictionLosses
from cdrmix.training.preferences import (
    PreferenceOptimization,
    PreferenceValidation,
    Reference,
    make_reference,
    stored_reference,
)
from cdrmix.training.profiling import make_profiler
from cdrmix.training.row_objective import RowObjective
from cdrmix.training.starting import load_weights
from cdrmix.training.threads import ThreadChoice
from cdrmix.training.trackers import Trackers
from cdrmix.training.trainer import Trainer
from cdrmix.training.watchdog import make_watchdog


class TrainResult(NamedTuple):
    """What a finished stage A reports. final_loss: next-token nats of the last step; seconds: of training alone."""

    step: int
    final_loss: float
    valid_bits_per_byte: float | None
    tokens_per_second: float
    seconds: float
    checkpoint: Path


def train(
    config: Config,
    run: RunFolder,
    shards: ShardSet,
    *,
    build: Callable[[Config], LossModule] = build_loss_model,
    resume: str | None = None,
    console: bool = True,
    callbacks: Sequence[Callback] = (),
    mirror: Mirroring | None = None,
) -> TrainResult:
    """Trains to `train.steps` and returns with the final checkpoint committed. Every process of the run calls it.

    build: makes the model with its loss. By default a model of this package.
    resume: anything but None continues from the newest whole checkpoint of the run folder, bit for bit.
    console: whether rank 0 shows its progress; metrics and checkpoints are written either way.
    mirror: copies the checkpoints to a second store, in the first process.
    Raises what Trainer.fit raises; OutOfMemoryError, DiskFullError, CheckpointError, ConfigError, VocabularyError;
    ShardError when the text has changed since the run began.
    """
    settings = config.train
    world = join(config)
    with memory_guard(config, in_rows=False), contextlib.ExitStack() as stack:
        seed_everything(config.run.seed)  # the same in every process: all build the same weights
        _check_vocabulary(config, shards)
        pairs = config.train.dpo is not None
        loader = train_loader(config, shards.train, *world.loader_ranks, kind=PairLoader if pairs else TrainLoader)
        loss_model = build(config)
        engine = make_engine(config, loss_model, world, base=loss_model.base)
        for line in loss_model.prepare():
            run.say(line)
        seed_everything(config.run.seed + world.generator)
        for line in loader.mixture.lines() if loader.mixture else []:
            run.say(line)
        reference = _start(engine, config, run, shards)
        progress, checkpoint = Progress(), None
        if resume is not None:
            progress, checkpoint = _continue(engine, config, run, shards)
        listeners: list[Callback] = [
            stack.enter_context(make_profiler(config, run, world)),
            stack.enter_context(Trackers(run, config)),
            stack.enter_context(
                Console(run, settings.steps, start_step=progress.step, shown=console, rows=settings.batch_sizes.before)
            ),
        ]
        objective = stack.enter_context(make_objective(config, loader, world, reference))
        objective.pass_over(progress.passed_over)
        saver = Saver(engine, config, run, fingerprints(shards), latest=checkpoint, mirror=mirror)
        trainer = Trainer(
            settings,
            engine,
            objective,
            ThreadChoice(thread_numbers(config, world), run.say),
            progress=progress,
            saver=saver,
            validation=(
                Validation(config, shards, world)
                if reference is None
                else PreferenceValidation(config, shards, world, reference, run.say)
            ),
            callbacks=[*listeners, *callbacks],
            watchdog=make_watchdog(config, run, world),
            on_skip=run.record_skip,
            go_back=functools.partial(_go_back, engine, config, run, shards, objective, saver),
            digests=make_digest_file(config, run, engine.trained),
            say=run.say,
        )
        with memory_guard(config, in_rows=True):
            progress = trainer.fit()
    if progress.skipped_steps:
        run.say(f"{progress.skipped_steps} of {settings.steps} steps were skipped")
    final = saver.latest
    assert final is not None, "the last step saves a checkpoint"
    speed = progress.tokens / progress.seconds if progress.seconds else 0.0
    return TrainResult(progress.step, progress.loss, progress.valid_bits_per_byte, speed, progress.seconds, final)


def make_objective(
    config: Config, loader: TrainLoader, world: DistributedContext, reference: Reference | None
) -> RowObjective:
    """What stage A of a configuration optimises. reference: of DPO."""
    if reference is not None:
        return PreferenceOptimization(config, loader, world, reference)
    return (Pretraining if loader.weighting is None else PartedPretraining)(config, loader, world)


class Pretraining(RowObjective):
    """Next-token prediction as the trainer's objective, or that of several tokens (model.prediction)."""

    measures: tuple[str, ...] = ("next_token_sum", "load_balance", "z_loss")

    def __init__(self, config: Config, loader: TrainLoader, world: DistributedContext) -> None:
        super().__init__(config, loader, world)
        self._prediction = PredictionLosses(config)
        self.measures += self._prediction.measures

    def forward(self, engine: Engine, micro_batch: Batch, *, last: bool) -> Outcome:
        """The loss model's forward pass."""
        prediction = self._prediction.at(micro_batch.step)
        losses = engine.forward(micro_batch, last=last, prediction=prediction)
        terms = [losses.next_token_sum, losses.load_balance, losses.z_loss, *self._prediction.sums(losses)]
        return Outcome(
            losses.total, torch.stack([term.detach().float() for term in terms]), losses.router, losses.depth
        )

    def loss(self, totals: StepTotals) -> float:
        """Nats a token."""
        return totals.sums["next_token_sum"] / self._token_count

    def record(self, facts: StepFacts, totals: StepTotals) -> StepRecord:
        """The step, with the loss of each further depth that has a weight at it."""
        return dataclasses.replace(super().record(facts, totals), prediction_losses=self._prediction.means(totals))


class Validation:
    """Bits per byte of `train.evaluate_rows` held-out rows; with data.objectives.weights the losses of the parts too.

    Fill in the middle is validated on as many rows of rearranged held-out documents.
    """

    def __init__(self, config: Config, shards: ShardSet, world: DistributedContext) -> None:
        train, self._config = config.train, config

        def held_out(split: Split) -> EvalLoader:
            rows = config.data.row_length, train.micro_batch_rows, train.evaluate_rows
            return EvalLoader(split, *rows, *world.loader_ranks)

        self._batches = held_out(shards.valid)
        self._text_bytes, self._domain_bytes = self._batches.text_bytes, self._batches.domain_bytes
        check_best_metric(train, self._domain_bytes)
        self._parted, self._rearranged = config.data.objectives.weights is not None, None
        if self._parted and shards.rearranged is not None:
            self._rearranged = held_out(shards.rearranged)

    def complete(self, engine: Engine, record: StepRecord, progress: Progress) -> tuple[StepRecord, Progress]:
        """A step's record and progress with the validation figures of the weights that the engine has after it."""
        parts = PartScores(engine.world.device) if self._parted else None
        with uncompiled(self._config):
            score = evaluate(
                engine.evaluated,
                self._batches,
                self._text_bytes,
                domain_bytes=self._domain_bytes,
                nats=parts or loss_model_nats,
                copies=engine.world.tensor_parallel * engine.world.pipeline_parallel,
            )
            if parts is not None and self._rearranged is not None:
                parts.add_rearranged(engine.evaluated, self._rearranged)
        bits = score.bits_per_byte
        record = dataclasses.replace(
            record,
            valid_loss=score.loss_nats_per_token,
            valid_bits_per_byte=bits,
            valid_domains={name: of_domain.bits_per_byte for name, of_domain in score.domains.items()},
            valid_parts={} if parts is None else parts.losses(),
        )
        progress = dataclasses.replace(progress, valid_bits_per_byte=bits, unvalidated=None)
        return record, updated_best(progress, self._config.train, record)


def fingerprints(shards: ShardSet) -> Fingerprints:
    """What a checkpoint notes of the shards it was trained on."""
    return Fingerprints(shards.tokenizer_fingerprint, shards.fingerprint)


def _start(engine: Engine, config: Config, run: RunFolder, shards: ShardSet) -> Reference | None:
    """Loads the weights that the training starts from, unless a checkpoint follows. Returns the reference of DPO."""
    begun = engine.world.gather(bool(list_checkpoints(run.checkpoints)), "whether the run has begun")[0]
    # Without a checkpoint the training starts from the model as it is now, which may not be that of a stored reference.
    reference = stored_reference(run, shards, engine.world) if config.train.dpo is not None and begun else None
    missing = config.train.dpo is not None and reference is None
    if config.train.start_from is not None and (missing or not begun):
        load_weights(engine, config, shards)
    if missing:
        if begun:
            run.say(
                "The stored log-probabilities of the reference model are missing or damaged. They are right only if "
                f"{config.train.start_from or 'the base model'} is still the model that this run began with"
            )
        run.say("Computing the log-probabilities of all answers under the model that the training starts from")
        reference = make_reference(engine, config, run, shards)
    return reference


def _check_vocabulary(config: Config, shards: ShardSet) -> None:
    if shards.vocab_size > config.model.vocab_size:
        raise VocabularyError(
            f"the shards at {shards.path} use {shards.vocab_size} token ids, but model.vocab_size is "
            f"{config.model.vocab_size}; set it to at least {shards.vocab_size}, or prepare the text again"
        )


def _continue(engine: Engine, config: Config, run: RunFolder, shards: ShardSet) -> tuple[Progress, Path | None]:
    # Rank 0 verifies and chooses, all load the same one.
    world = engine.world
    choice: tuple[Path | None, str] = (None, "")
    if world.is_main_process:
        choice = _newest(run)
    checkpoint, problem = world.gather(choice, "the choice of a checkpoint")[0]
    if problem:
        raise CheckpointError(problem)
    if checkpoint is None:
        run.say("no checkpoint yet: starting from step 0")
        run.drop_metrics_after(0)
        run.drop_records_after(0)
        return Progress(), None
    return _load(engine, config, run, shards, checkpoint), checkpoint


def _load(
    engine: Engine, config: Config, run: RunFolder, shards: ShardSet, checkpoint: Path, *, resumed: bool = True
) -> Progress:
    progress = load_checkpoint(engine, checkpoint, config, fingerprints(shards))
    run.drop_metrics_after(progress.step if progress.unvalidated is None else progress.step - 1)
    run.drop_records_after(progress.step, resumed=resumed)
    if engine.world.is_main_process:
        restore_best(run.checkpoints, progress)
    run.say(f"continuing from {checkpoint.name}")
    for difference in differences(checkpoint, engine):
        run.say(f"{difference}: sums are taken in another order, so the bits will not be those of an unbroken run")
    return progress


def _go_back(
    engine: Engine,
    config: Config,
    run: RunFolder,
    shards: ShardSet,
    objective: RowObjective,
    saver: Saver,
    before: Progress,
    last: int,
    reason: str,
) -> Progress | None:
    """Loads the newest checkpoint from before the steps that were skipped, and returns its progress.

    The next rows are those after the rows of step `last`. None: there is no such checkpoint.
    """
    checkpoint: Path | None = None
    if engine.world.is_main_process:
        checkpoint = newest_whole_checkpoint(
            run.checkpoints, run.say, wanted=lambda path: not SKIPPED & read_progress(path).consecutive_skips.keys()
        )
    checkpoint = engine.world.gather(checkpoint, "the choice of a checkpoint to go back to")[0]
    if checkpoint is None:
        return None
    saver.go_back(checkpoint)
    progress = _load(engine, config, run, shards, checkpoint, resumed=False)
    sizes = config.train.batch_sizes
    first, end = (sizes.before(step) + before.passed_over for step in (progress.step, last))
    objective.pass_over(before.passed_over + end - first)
    run.record_rollback(last, progress.step, range(first, end), reason)
    return dataclasses.replace(progress, rollbacks=before.rollbacks + 1, passed_over=before.passed_over + end - first)


def _newest(run: RunFolder) -> tuple[Path | None, str]:
    newest = newest_whole_checkpoint(run.checkpoints, run.say)
    if newest is None and list_checkpoints(run.checkpoints):
        return None, (
            f"no checkpoint in {run.checkpoints} is whole, so this run cannot be continued; start a new one without "
            "--resume"
        )
    return newest, ""
