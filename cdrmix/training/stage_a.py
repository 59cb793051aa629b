"""Stage A: next-token training. The loop that every mode runs, from one CPU process to many GPUs."""

from __future__ import annotations

import dataclasses
import io
import resource
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cdrmix.config.schema import Config, Model
from cdrmix.data.loader import EvalLoader, Prefetcher, train_loader
from cdrmix.data.shards import ShardSet
from cdrmix.errors import CheckpointError, Preempted, VocabularyError
from cdrmix.eval.perplexity import evaluate
from cdrmix.eval.routing import expert_load, routing_metrics
from cdrmix.inference.checkpoints import list_checkpoints, newest_whole_checkpoint
from cdrmix.model.feed_forward.router import balance_routers
from cdrmix.model.loss import Losses
from cdrmix.run_folder import RunFolder
from cdrmix.runtime import seed_everything
from cdrmix.training.build import build_loss_model
from cdrmix.training.checkpoint import (
    Fingerprints,
    Progress,
    differences,
    load_checkpoint,
    prune,
    restore_best,
    save_checkpoint,
)
from cdrmix.training.compiling import uncompiled
from cdrmix.training.distributed import DistributedContext, join, thread_numbers
from cdrmix.training.engine import Engine, make_engine
from cdrmix.training.faults import Skips, StopRequest, check_finite, memory_guard
from cdrmix.training.metrics import Console, StepRecord, Trackers
from cdrmix.training.profiling import make_profiler
from cdrmix.training.schedule import learning_rate
from cdrmix.training.threads import ThreadChoice


class TrainResult(NamedTuple):
    """What a finished stage A reports. final_loss: next-token nats of the last step; seconds: of training alone."""

    step: int
    final_loss: float
    valid_bits_per_byte: float | None
    tokens_per_second: float
    seconds: float
    checkpoint: Path


def train(
    config: Config, run: RunFolder, shards: ShardSet, *, resume: str | None = None, console: bool = True
) -> TrainResult:
    """Trains to `train.steps` and returns with the final checkpoint committed. Every process of the run calls it.

    resume: anything but None continues from the newest whole checkpoint of the run folder, bit for bit.
    console: whether rank 0 shows its progress; metrics and checkpoints are written either way.
    Raises Preempted after SIGTERM, SIGHUP or SIGINT, once a checkpoint is committed; NonFiniteLossError before a NaN
    reaches the weights; OutOfMemoryError, DiskFullError, CheckpointError, ConfigError, VocabularyError; ShardError
    when the text has changed since the run began.
    """
    settings = config.train
    bias_rate = config.model.feed_forward.bias_update_rate if config.model.routers else 0.0
    world = join(config)
    with memory_guard(config):
        seed_everything(config.run.seed)  # the same in every process: all build the same weights
        _check_vocabulary(config, shards)
        loader = train_loader(config, shards.train, world.rank, world.size)
        engine = make_engine(config, build_loss_model(config), world)
        seed_everything(config.run.seed + world.rank)
        for line in loader.mixture.lines() if loader.mixture else []:
            run.say(line)
        validation = Validation(config, shards, world)
        progress, checkpoint = Progress(), None
        if resume is not None:
            progress, checkpoint = _continue(engine, config, run, shards)
        skips = Skips(may_skip=settings.precision == "fp16", total=progress.skipped_steps)
        saver = Saver(engine, config, run, fingerprints(shards), latest=checkpoint)
        meter, threads = Meter(progress), ThreadChoice(thread_numbers(config, world), run.say)

        with (
            StopRequest() as stop,
            Trackers(run, config) as trackers,
            Console(run, settings.steps, start_step=progress.step, stream=None if console else _Nowhere()) as screen,
            Prefetcher(loader, settings.steps, world.device) as ahead,
            make_profiler(config, run, world) as profiler,
        ):
            if progress.unvalidated is not None:  # a signal came first
                record, progress = validation.complete(engine, StepRecord(**progress.unvalidated), progress)
                trackers.write(record)
                screen.update(record)
                saver.point_best(progress)
            for step in range(progress.step, settings.steps):
                number = step + 1
                threads.begin()
                meter.start()
                rate = learning_rate(settings, step)
                engine.set_learning_rate(rate)
                shown = number % settings.log_every == 0 or number in (1, settings.steps)
                evaluates = number % settings.evaluate_every == 0 or number == settings.steps

                tally = MetricAccumulator(world, engine.share, counts_routing=shown or evaluates or bias_rate > 0)
                batches = ahead.micro_batches(step)
                for batch in batches:
                    losses = engine.forward(batch, last=batch is batches[-1])  # forward pass and loss
                    engine.backward(losses.total)
                    tally.add(losses)
                figures = tally.agree(stop.requested, batches[0].token_count, engine.clip())
                check_finite(figures.loss, number)
                applied = engine.step(figures.gradient_norm)
                engine.zero()
                if applied and bias_rate > 0:
                    balance_routers(engine.module, tally.routing().demand_LE, bias_rate)
                skips.record(applied, number)
                profiler.step()

                seconds = meter.stop()
                threads.end(seconds - progress.seconds)
                progress = dataclasses.replace(
                    progress,
                    step=number,
                    tokens=progress.tokens + (round(batches[0].token_count) if applied else 0),
                    seconds=seconds,
                    loss=figures.next_token_loss,
                    skipped_steps=skips.total,
                )
                if shown or evaluates:
                    record = StepRecord(
                        step=number,
                        epoch=loader.epoch(number),
                        loss=figures.loss,
                        next_token_loss=figures.next_token_loss,
                        load_balance=figures.load_balance,
                        z_loss=figures.z_loss,
                        learning_rate=rate,
                        gradient_norm=engine.gradient_norm,
                        tokens=progress.tokens,
                        tokens_per_second=meter.tokens_per_second(progress),
                        seconds=progress.seconds,
                        memory_gib=memory_gib(world),
                        **tally.routing().measures(config.model),
                    )
                    if evaluates and figures.stop:
                        # Whoever sent the signal may not wait for a validation: the resumed run begins with it.
                        run.say(f"told to stop: step {number} is saved first, and validated when the run goes on")
                        progress = dataclasses.replace(progress, unvalidated=dataclasses.asdict(record))
                    else:
                        if evaluates:
                            record, progress = validation.complete(engine, record, progress)
                        trackers.write(record)
                        screen.update(record)
                else:
                    screen.advance(number)
                periodic = number % settings.checkpoint_every == 0 or number == settings.steps or figures.stop
                if periodic or progress.best_step == number:
                    saver.save(progress, periodic=periodic)
                if figures.stop:
                    raise Preempted(
                        f"stopped by a signal after step {number} of {settings.steps}; {saver.latest} is whole, "
                        "continue with --resume auto"
                    )
            if world.any(stop.requested):  # it came during the last validation or checkpoint
                raise Preempted(
                    f"stopped by a signal after the last step; {saver.latest} is whole, --resume auto goes on"
                )
    if skips.total:
        run.say(f"{skips.total} of {settings.steps} steps were skipped for fp16 overflow")
    final = saver.latest
    assert final is not None, "the last step saves a checkpoint"
    speed = progress.tokens / progress.seconds if progress.seconds else 0.0
    return TrainResult(progress.step, progress.loss, progress.valid_bits_per_byte, speed, progress.seconds, final)


class StepMetrics(NamedTuple):
    """A step's losses over the global batch, in nats; the norm of its gradients before clipping, None where DeepSpeed
    finds it; whether any process was told to stop."""

    loss: float
    next_token_loss: float
    load_balance: float
    z_loss: float
    gradient_norm: float | None
    stop: bool


class RoutingCounts(NamedTuple):
    """Of a step's global batch, by router and expert [L, E]: routes that wanted it, rows that it computed."""

    demand_LE: Tensor
    counts_LE: Tensor

    def measures(self, model: Model) -> dict[str, Any]:
        """The routing fields of a StepRecord; {} without a mixture of experts."""
        if not len(self.demand_LE):
            return {}
        return {
            "routers": list(model.routers),
            "router": routing_metrics(self.demand_LE, model.feed_forward.capacity_factor, self.counts_LE),
            "load": expert_load(self.demand_LE),
        }


class MetricAccumulator:
    """Sums the losses of a step's micro-batches over all processes, in one all-reduce and one read of the device.

    counts_routing: the experts' loads too. They are results of the forward pass, so activation checkpointing, which
    runs it twice, counts them once.
    """

    def __init__(self, world: DistributedContext, share: float, *, counts_routing: bool) -> None:
        self._world = world
        self._share = share
        self._counts_routing = counts_routing
        self._sums = torch.zeros(5, dtype=torch.float64, device=world.device)
        self._counts_2LE: Tensor | None = None  # demand, rows computed
        self._routing = RoutingCounts(*torch.zeros(2, 0, 0))

    def add(self, losses: Losses) -> None:
        """Takes in a micro-batch."""
        terms = (losses.total, losses.next_token_sum, losses.load_balance, losses.z_loss)
        self._sums[:4] += torch.stack([term.detach().double() for term in terms])
        if self._counts_routing and losses.router is not None:
            counts_2LE = torch.stack([losses.router.demand_LE, losses.router.counts_LE]).double()
            self._counts_2LE = counts_2LE if self._counts_2LE is None else self._counts_2LE + counts_2LE

    def agree(self, stop: bool, token_count: float, gradient_norm: Tensor | None) -> StepMetrics:
        """The global batch's figures, the same in every process. Waits for the device: the step's only wait.

        stop: this process was told to stop. gradient_norm: a scalar on the device, the same in every process.
        """
        self._sums[4] = float(stop)
        counts = self._sums.new_zeros(2, 0, 0) if self._counts_2LE is None else self._counts_2LE
        parts = [self._world.total(torch.cat([self._sums, counts.flatten()]))]
        if gradient_norm is not None:
            parts.append(gradient_norm.double().reshape(1))
        read = torch.cat(parts).cpu()
        self._routing = RoutingCounts(*read[5 : 5 + counts.numel()].view(counts.shape))
        total, next_token, load_balance, z_loss, stops, *rest = read.tolist()
        norm = None if gradient_norm is None else rest[-1]
        return StepMetrics(
            total, next_token / token_count, load_balance * self._share, z_loss * self._share, norm, stops > 0
        )

    def routing(self) -> RoutingCounts:
        """The global batch's loads that `agree` read, on the CPU; of no layers without a mixture of experts."""
        return self._routing


class Meter:
    """Training time: what passes between `start` and `stop`, so without validation and checkpoints."""

    def __init__(self, progress: Progress) -> None:
        self._seconds = progress.seconds
        self._started = 0.0
        self._shown = progress

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> float:
        """Seconds since the run began, interruptions left out."""
        self._seconds += time.perf_counter() - self._started
        return self._seconds

    def tokens_per_second(self, progress: Progress) -> float:
        """Speed since the last time this was asked."""
        tokens, seconds = progress.tokens - self._shown.tokens, progress.seconds - self._shown.seconds
        self._shown = progress
        return tokens / seconds if seconds > 0 else 0.0


class Validation:
    """The periodic look at `train.evaluate_rows` held-out rows."""

    def __init__(self, config: Config, shards: ShardSet, world: DistributedContext) -> None:
        train, self._config = config.train, config
        self._batches = EvalLoader(
            shards.valid, config.data.row_length, train.micro_batch_rows, train.evaluate_rows, world.rank, world.size
        )
        self._text_bytes = self._batches.text_bytes

    def complete(self, engine: Engine, record: StepRecord, progress: Progress) -> tuple[StepRecord, Progress]:
        """A step's record and progress with the validation figures of the weights as they are after it."""
        with uncompiled(self._config):
            score = evaluate(engine.module, self._batches, self._text_bytes)
        bits = score.bits_per_byte
        record = dataclasses.replace(record, valid_loss=score.loss_nats_per_token, valid_bits_per_byte=bits)
        progress = dataclasses.replace(progress, valid_bits_per_byte=bits, unvalidated=None)
        if progress.best_bits_per_byte is None or bits < progress.best_bits_per_byte:
            progress = dataclasses.replace(progress, best_bits_per_byte=bits, best_step=progress.step)
        return record, progress


class Saver:
    """Checkpoints of a run, at most one a step: periodic, best and last. `latest` is the one that a resume reads."""

    def __init__(self, engine: Engine, config: Config, run: RunFolder, text: Fingerprints, latest: Path | None) -> None:
        self._engine, self._config, self._run, self._text = engine, config, run, text
        self.latest = latest

    def save(self, progress: Progress, *, periodic: bool) -> None:
        """Commits a checkpoint, then removes what need not stay."""
        folder = self._run.checkpoints
        self.latest = save_checkpoint(self._engine, folder, progress, self._config, self._text, periodic=periodic)
        if self._engine.world.is_main_process:
            prune(folder, self._config.train.keep_last, self.latest)
        self._run.note(f"checkpoint {self.latest.name}{' (best)' if progress.best_step == progress.step else ''}")
        self._engine.world.barrier()

    def point_best(self, progress: Progress) -> None:
        """Makes the `best` pointer say what the progress says."""
        if self._engine.world.is_main_process:
            restore_best(self._run.checkpoints, progress)
        self._engine.world.barrier()


def memory_gib(world: DistributedContext) -> float:
    """Peak memory of this process in GiB: of the GPU, or on a CPU its resident memory."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def fingerprints(shards: ShardSet) -> Fingerprints:
    """What a checkpoint notes of the shards it was trained on."""
    return Fingerprints(shards.tokenizer_fingerprint, shards.fingerprint)


def _check_vocabulary(config: Config, shards: ShardSet) -> None:
    if shards.vocab_size > config.model.vocab_size:
        raise VocabularyError(
            f"the shards at {shards.path} use {shards.vocab_size} token ids, but model.vocab_size is "
            f"{config.model.vocab_size}; set it to at least {shards.vocab_size}, or prepare the text again"
        )


def _continue(engine: Engine, config: Config, run: RunFolder, shards: ShardSet) -> tuple[Progress, Path | None]:
    # Rank 0 verifies and chooses, all load the same one.
    world = engine.world
    found: tuple[Path | None, str] = (None, "")
    if world.is_main_process:
        found = _newest(run)
    checkpoint, problem = world.gather(found)[0]
    if problem:
        raise CheckpointError(problem)
    if checkpoint is None:
        run.say("no checkpoint yet: starting from step 0")
        run.drop_metrics_after(0)
        return Progress(), None
    progress = load_checkpoint(engine, checkpoint, config, fingerprints(shards))
    run.drop_metrics_after(progress.step if progress.unvalidated is None else progress.step - 1)
    if world.is_main_process:
        restore_best(run.checkpoints, progress)
    run.say(f"continuing from {checkpoint.name}")
    for difference in differences(checkpoint, engine):
        run.say(f"{difference}: sums are taken in another order, so the bits will not be those of an unbroken run")
    return progress, checkpoint


def _newest(run: RunFolder) -> tuple[Path | None, str]:
    newest = newest_whole_checkpoint(run.checkpoints, run.say)
    if newest is None and list_checkpoints(run.checkpoints):
        return None, (
            f"no checkpoint in {run.checkpoints} is whole, so this run cannot be continued; start a new one without "
            "--resume"
        )
    return newest, ""


class _Nowhere(io.StringIO):
    """A stream that keeps nothing: the console of a run without one."""

    def write(self, text: str) -> int:
        return len(text)
