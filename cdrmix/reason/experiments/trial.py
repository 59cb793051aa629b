"""One run of an experiment: trains small models by phases in this process, and goes on where a killed run was."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from cdrmix.config.schema import Config
from cdrmix.data.tokenizer import TextTokenizer
from cdrmix.errors import ConfigError, Preempted
from cdrmix.inference.checkpoints import newest_whole_checkpoint
from cdrmix.reason.agent.policy import PolicyPhase
from cdrmix.reason.build import make_phase
from cdrmix.reason.joint import parts_of
from cdrmix.reason.model import StageBModel
from cdrmix.reason.phase import Phase, PhaseObjective, freeze, phase_config, reasoning_of
from cdrmix.records import PhaseRecord, Record
from cdrmix.training.callbacks import Callback
from cdrmix.training.checkpoint import Fingerprints, Progress, Saver, load_checkpoint
from cdrmix.training.distributed import join
from cdrmix.training.engine import make_engine
from cdrmix.training.threads import ThreadChoice
from cdrmix.training.trainer import Trainer

PARTS = 20  # of a phase, with a checkpoint after each
GENERATED = Fingerprints(tokenizer="of the task", text="generated")  # both are determined by the configuration

Say = Callable[[str], None]


class Trial:
    """The trainings of one arm at one seed.

    say: prints a line; None: nothing is printed. folder: takes the checkpoints of each phase, and the next trial with
        this folder and the same configuration goes on from them with the same bits; None: no checkpoints.
    earlier_seconds: of earlier trials that this one continues, the time of the steps that their checkpoints have.
    """

    def __init__(self, say: Say | None = None, folder: Path | None = None) -> None:
        self._say, self._folder = say, folder
        self.earlier_seconds = 0.0

    def say(self, text: str) -> None:
        """Prints a line."""
        if self._say is not None:
            self._say(text)

    def train_phase(self, name: str, config: Config, model: StageBModel, tokenizer: TextTokenizer | None) -> None:
        """`train` by a phase of the configuration, with what it replays. tokenizer: of the episodes' text."""
        section = getattr(reasoning_of(config).phases, name)
        self.train(phase_config(config, section), model, make_phase(name, config, tokenizer))

    def train(self, config: Config, model: StageBModel, phase: Phase) -> list[dict[str, float]]:
        """Trains a model by a phase, and prints the measures of every tenth of the steps.

        config: from `phase_config`. Returns the records of the steps that were made here.
        Raises Preempted after a signal, once a checkpoint is committed.
        """
        steps = config.train.steps
        train = config.train.model_copy(update={"log_every": 1, "checkpoint_every": max(steps // PARTS, 1)})
        config = config.model_copy(update={"train": train})
        freeze(model, phase)
        world = join(config)
        engine = make_engine(config, model, world)
        history = _History(phase.name, steps, self.say)
        progress, saver, store = Progress(), None, None
        if self._folder is not None and _continues(phase):
            store = _Store(self._folder / phase.name)
            newest = newest_whole_checkpoint(store.checkpoints, self.say)
            if newest is not None:
                progress = load_checkpoint(engine, newest, config, GENERATED)
                self.earlier_seconds += progress.seconds
                self.say(f"  {phase.name}: continues after step {progress.step}")
            saver = Saver(engine, config, store, GENERATED, latest=newest)
        trainer = Trainer(
            train,
            engine,
            PhaseObjective(phase, model, world),
            ThreadChoice([torch.get_num_threads()], print),
            progress=progress,
            saver=saver,
            callbacks=[history],
        )
        try:
            trainer.fit()
        except Preempted:
            again = "" if saver is None else "; the same command goes on from there"
            raise Preempted(f"{phase.name}: stopped after step {trainer.progress.step} of {steps}{again}") from None
        except ConfigError:
            # Of a phase that learns nothing. It counts such steps from where it begins, so it has to begin again.
            if store is not None:
                shutil.rmtree(store.checkpoints)
            raise
        return history.records


class _Store:
    """The checkpoints of a phase, without a log."""

    def __init__(self, checkpoints: Path) -> None:
        self.checkpoints = checkpoints
        checkpoints.mkdir(parents=True, exist_ok=True)

    def note(self, text: str) -> None:
        """Does nothing."""


class _History(Callback):
    """Stores the measures of every step, and prints those of every tenth of the steps."""

    def __init__(self, phase: str, steps: int, say: Say) -> None:
        self._phase, self._period, self._say = phase, max(steps // 10, 1), say
        self.records: list[dict[str, float]] = []

    def on_record(self, record: Record) -> None:
        """One step."""
        assert isinstance(record, PhaseRecord)
        self.records.append(record.measures)
        if record.phase_step % self._period == 0:
            figures = ", ".join(f"{name} {value:.3f}" for name, value in record.measures.items())
            self._say(f"  {self._phase}, step {record.phase_step}: {figures}")


def _continues(phase: Phase) -> bool:
    """Whether a phase can go on from a checkpoint, which does not have the reference of a KL term."""
    return not any(isinstance(part, PolicyPhase) and part.objective.kl_weight for part in parts_of(phase))
