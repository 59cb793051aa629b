"""The trainer: the only loop that trains, for stage A, every phase of stage B and the experiments."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

from cdrmix.config.schema_training import Train
from cdrmix.errors import NonFiniteLossError, Preempted
from cdrmix.peak_memory import peak
from cdrmix.records import Record, StepRecord, step_record
from cdrmix.training.callbacks import Callback
from cdrmix.training.checkpoint import Progress, Saver
from cdrmix.training.digests import DigestFile
from cdrmix.training.engine import Engine
from cdrmix.training.faults import NORM, WHEN_SKIPPED, Skips, StopRequest, TooManySkips
from cdrmix.training.objective import Objective, StepAccumulator, StepFacts, StepTotals
from cdrmix.training.schedule import group_rates, learning_rate
from cdrmix.training.threads import ThreadChoice
from cdrmix.training.watchdog import Watchdog


class Validation(Protocol):
    """Measures the weights on held-out text."""

    def complete(self, engine: Engine, record: StepRecord, progress: Progress) -> tuple[StepRecord, Progress]:
        """A step's record and progress with the validation figures of the weights after it."""


class Trainer:
    """Takes an engine through the steps of an objective.

    settings: steps, schedule and periods. progress: where the run is; first_step: its finished steps when the objective
    begins. saver: commits checkpoints; None: no checkpoints. validation: measured each `evaluate_every` steps; None:
    never. callbacks: are told of steps, records and checkpoints. threads: chooses the CPU threads. watchdog: ends the
    process if a step hangs. on_skip: is told of a step that train.skip skips, and why. digests: get those of each step.
    go_back: loads a checkpoint after train.skip has skipped too many steps, and returns its progress. It gets the
    progress before, the last of these steps, and the reason; without such a checkpoint it returns None. None: these
    steps end the training. say: prints a line.
    """

    def __init__(
        self,
        settings: Train,
        engine: Engine,
        objective: Objective,
        threads: ThreadChoice,
        *,
        progress: Progress | None = None,
        first_step: int = 0,
        saver: Saver | None = None,
        validation: Validation | None = None,
        callbacks: Sequence[Callback] = (),
        watchdog: Watchdog | None = None,
        on_skip: Callable[[int, str], None] | None = None,
        digests: DigestFile | None = None,
        go_back: Callable[[Progress, int, str], Progress | None] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.settings, self.engine, self.objective, self.threads = settings, engine, objective, threads
        self.progress = Progress() if progress is None else progress
        self.first_step, self.saver, self.validation, self.callbacks = first_step, saver, validation, callbacks
        self._watchdog, self._on_skip, self._digests, self._say = watchdog, on_skip, digests, say
        self._go_back = go_back
        self._skips = self._new_skips()
        self._clock = Clock(self.progress)

    def fit(self) -> Progress:
        """Trains to the objective's last step; with a saver its checkpoint is committed then. Every process calls.

        Raises Preempted after one of STOP_SIGNALS or a callback's wish, once a checkpoint is committed;
        NonFiniteLossError before a NaN reaches the weights, unless train.skip skips the step.
        """
        with StopRequest() as stop, self.saver or nullcontext(), self._watchdog or nullcontext():
            self._validate_interrupted(stop)
            while (step := self.progress.step - self.first_step) < self.settings.steps:
                try:
                    self._step(step, stop)
                except TooManySkips as fault:
                    self._roll_back(self.first_step + step + 1, fault, stop)
            if self.engine.world.any(stop.requested):  # it came during the last validation or checkpoint
                raise Preempted(self._stopped("the last step"))
        return self.progress

    def _new_skips(self) -> Skips:
        progress, settings = self.progress, self.settings
        begun = progress.step > self.first_step  # before, its losses are those of another objective
        return Skips(
            settings.skip,
            fp16=settings.precision == "fp16",
            total=progress.skipped_steps,
            consecutive=progress.consecutive_skips if begun else {},
            recent=progress.recent_losses if begun else (),
            goes_back=self._go_back is not None and progress.rollbacks < settings.skip.rollbacks,
        )

    def _roll_back(self, number: int, fault: TooManySkips, stop: StopRequest) -> None:
        """Goes back to a checkpoint, after which other rows follow than before."""
        assert self._go_back is not None
        assert self.saver is not None
        if self._watchdog is not None:
            self._watchdog.end()
        seconds, skipped = self._clock.stop(), self._skips.total
        for callback, checkpoint in itertools.product(self.callbacks, self.saver.finish()):
            callback.on_checkpoint(checkpoint)
        progress = self._go_back(self.progress, number, str(fault))
        if progress is None and fault.harmless:
            # It goes on as without rollbacks, also when it is resumed: the step is made again and skipped.
            self.progress = dataclasses.replace(self.progress, rollbacks=self.settings.skip.rollbacks)
            self._skips = self._new_skips()
            return
        if progress is None:
            raise NonFiniteLossError(
                f"{fault}, and there is no checkpoint from before them to go back to. {WHEN_SKIPPED}"
            )
        self.progress = dataclasses.replace(progress, seconds=seconds, skipped_steps=skipped)
        self._clock.tokens_per_second(self.progress)  # the speed is measured from here on
        self._skips = self._new_skips()
        self._validate_interrupted(stop)

    def _step(self, step: int, stop: StopRequest) -> None:
        """One optimizer step, counted from 0, and what is due after it."""
        settings, engine, objective = self.settings, self.engine, self.objective
        number = self.first_step + step + 1  # of the run's steps
        last = step + 1 == settings.steps
        validates = self.validation is not None and (number % settings.evaluate_every == 0 or last)
        recorded = validates or step == 0 or last or (step + 1) % settings.log_every == 0

        self.threads.begin()
        self._clock.start()
        if self._watchdog is not None:
            self._watchdog.begin(number)
        rate = learning_rate(settings, step)
        engine.set_learning_rate(rate, group_rates(settings, step))
        sums = StepAccumulator(engine.world, objective.measures, counts_routing=recorded or objective.balances_routers)
        for outcome in engine.passes(objective.micro_batches(engine, step), objective.forward):
            sums.add(outcome)
        totals = sums.total(stop.requested, self.saver is not None and self.saver.written, engine.clip())
        reason = self._skips.reason(totals.loss)
        if not engine.step(totals.gradient_norm, discard=reason is not None) and reason is None:
            reason = NORM
        engine.zero()
        if reason is None:
            objective.update(engine, totals)
        self._skips.record(number, totals.loss, reason)
        if reason is not None and self._on_skip is not None and not self._skips.is_overflow(reason):
            self._on_skip(number, reason)
        if self._digests is not None:
            self._digests.add(number, totals.loss, engine.digests())

        if self._watchdog is not None:
            self._watchdog.end()
        seconds = self._clock.stop()
        self.threads.end((seconds - self.progress.seconds) / settings.batch_sizes.share(step))
        self.progress = dataclasses.replace(
            self.progress,
            step=number,
            phase=objective.phase,
            tokens=self.progress.tokens + (objective.tokens(totals) if reason is None else 0),
            seconds=seconds,
            loss=objective.loss(totals),
            skipped_steps=self._skips.total,
            consecutive_skips=dict(self._skips.consecutive),
            recent_losses=tuple(self._skips.recent),
        )
        for callback in self.callbacks:
            callback.on_step(number)
        if recorded:
            self._record(step, rate, totals, validates, stop)
        due = number % settings.checkpoint_every == 0
        # While steps are skipped, checkpoints do not push out that from before, to which the run may go back.
        periodic = (due and not (settings.skip.rollbacks and self._skips.skipping)) or last or totals.stop
        kept = settings.keep_every is not None and number % settings.keep_every == 0
        if self.saver is not None:
            committed = self.saver.finish() if totals.saved else []
            if periodic or due or kept or self.progress.best_step == number:
                committed += self.saver.save(self.progress, periodic=periodic, wait=last or totals.stop)
            for callback, checkpoint in itertools.product(self.callbacks, committed):
                callback.on_checkpoint(checkpoint)
        if totals.stop:
            raise Preempted(self._stopped(f"step {step + 1} of {settings.steps}"))

    def _record(self, step: int, rate: float, totals: StepTotals, validates: bool, stop: StopRequest) -> None:
        facts = StepFacts(
            step=self.progress.step,
            objective_step=step + 1,
            learning_rate=rate,
            gradient_norm=self.engine.gradient_norm,
            tokens=self.progress.tokens,
            tokens_per_second=self._clock.tokens_per_second(self.progress),
            seconds=self.progress.seconds,
            memory_gib=peak(self.engine.world.device) / 2**30,
        )
        record = self.objective.record(facts, totals)
        if validates:
            assert isinstance(record, StepRecord)
            if totals.stop:
                # The sender of the signal may not wait for a validation: the resumed run begins with it.
                if self._say is not None:
                    self._say(f"told to stop: step {record.step} is saved first, and validated when the run goes on")
                self.progress = dataclasses.replace(self.progress, unvalidated=dataclasses.asdict(record))
                return
            record = self._validated(record)
        self._publish(record, stop)

    def _validated(self, record: StepRecord) -> StepRecord:
        assert self.validation is not None
        with self.engine.averaged():  # the weights that are exported and evaluated at the end
            record, self.progress = self.validation.complete(self.engine, record, self.progress)
        return record

    def _validate_interrupted(self, stop: StopRequest) -> None:
        """Validates the last step of a run that a signal ended before it could."""
        if self.progress.unvalidated is None:
            return
        self._publish(self._validated(step_record(self.progress.unvalidated)), stop)
        if self.saver is not None:
            self.saver.point_best(self.progress)

    def _publish(self, record: Record, stop: StopRequest) -> None:
        for callback in self.callbacks:
            if callback.on_record(record):
                stop.request()

    def _checkpoint(self) -> Path:
        assert self.saver is not None
        assert self.saver.latest is not None
        return self.saver.latest

    def _stopped(self, where: str) -> str:
        phase = "" if self.objective.phase is None else f" of phase {self.objective.phase}"
        text = f"stopped by a signal or a callback after {where}{phase}"
        return text if self.saver is None else f"{text}; {self._checkpoint()} is whole, continue with --resume auto"


class Clock:
    """Training time: what passes between `start` and `stop`, so without validation and checkpoints."""

    def __init__(self, progress: Progress) -> None:
        self._seconds = progress.seconds
        self._started = 0.0
        self._recorded = progress

    def start(self) -> None:
        """A step begins."""
        self._started = time.perf_counter()

    def stop(self) -> float:
        """A step ends. Returns the seconds since the run began, interruptions left out."""
        self._seconds += time.perf_counter() - self._started
        return self._seconds

    def tokens_per_second(self, progress: Progress) -> float:
        """Speed since the last time this was asked."""
        tokens, seconds = progress.tokens - self._recorded.tokens, progress.seconds - self._recorded.seconds
        self._recorded = progress
        return tokens / seconds if seconds > 0 else 0.0
