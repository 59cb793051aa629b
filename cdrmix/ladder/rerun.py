"""Steps of a run that are trained again: from its configuration, and from a checkpoint of them.

Determinism: two new runs of the same configuration have the same weights after N steps, and the losses and gradient
norms that the run recorded. Resume: the second continues from its checkpoint of step N in a new engine, and has the
weights of the first, which was not interrupted, at step 2 N.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cdrmix.compare import compare, first_metric_difference
from cdrmix.config.schema import Config
from cdrmix.errors import CdrmixError, Preempted
from cdrmix.inference.checkpoints import list_checkpoints, step_of
from cdrmix.json_text import parse_json
from cdrmix.records import read_records
from cdrmix.run_folder import RunFolder, environment
from cdrmix.training.callbacks import Callback
from cdrmix.workflow import run_all

STEPS = 20
SAME_MACHINE = ("python", "platform", "machine", "cpus", "versions")
NEVER = 10**9


class Reached(Exception):
    """The checkpoint of the step is written, at which a training that is measured ends."""


class StopAfter(Callback):
    """Ends a run right after the checkpoint of a step. Only what this raises is expected; a signal is a signal."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_checkpoint(self, checkpoint: Path) -> None:
        """Raises Reached."""
        if step_of(checkpoint) >= self.step:
            raise Reached


def train_again(run: RunFolder, say: Callable[[str], None]) -> dict[str, Any]:
    """Trains 2 N steps, N and N more, with N = 20, or less if the run is shorter. Returns determinism and resume.

    Each has steps, differences (sentences; none if all bits are the same) and tokens_per_second, or problem: why it
    cannot be measured here. Temporary folders are removed.
    """
    config = Config.from_yaml(run.config_snapshot)
    problem = _problem(run, config)
    if problem is None:
        try:
            with tempfile.TemporaryDirectory(prefix="cdrmix-again-") as folder:
                return _measure(run, config, Path(folder), say)
        except Preempted:
            raise
        except CdrmixError as error:
            problem = str(error)
    return {"determinism": {"problem": problem}, "resume": {"problem": problem}}


def _problem(run: RunFolder, config: Config) -> str | None:
    if config.train.steps < 3:
        return f"the run has {config.train.steps} steps; at least 3 are needed"
    if config.reasoning is not None and config.reasoning.backbone is not None:
        return "the run has no stage A: it begins with reasoning.backbone"
    processes = processes_of(run)
    if processes != 1:
        return f"the run was trained by {processes} processes, and this is one: sums would be taken in another order"
    return None


def processes_of(run: RunFolder) -> int | None:
    """The number of processes that wrote the newest checkpoint; None without a checkpoint that says it."""
    for checkpoint in reversed(list_checkpoints(run.checkpoints)):
        try:
            return int(parse_json((checkpoint / "state.json").read_text(encoding="utf-8"))["processes"])
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return None


def _measure(run: RunFolder, config: Config, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    steps = min(STEPS, (config.train.steps - 1) // 2)
    say(f"Training {2 * steps} steps again, {steps} once more, and {steps} from their checkpoint")
    first = _train(run, folder / "first", steps, 2 * steps)
    second = _train(run, folder / "second", steps, steps)
    fingerprint = run.summary().get("text_fingerprint")
    if first.summary().get("text_fingerprint") != fingerprint:
        problem = "the text has changed since the run: restore the former text"
        return {"determinism": {"problem": problem}, "resume": {"problem": problem}}
    speeds = [record.tokens_per_second for record in read_records(first.metrics_jsonl).steps[steps // 4 + 1 :]]
    common = {"steps": steps, "tokens_per_second": statistics.median(speeds), "problem": None}
    determinism = _differences(_checkpoint(first, steps), _checkpoint(second, steps))
    if metrics := first_metric_difference(first.path, second.path):
        determinism.append(metrics)
    compared = same_machine(run)
    if compared and (metrics := first_metric_difference(run.path, first.path)):
        determinism.append(f"the run and its first steps again: {metrics}")
    second = _train(run, folder / "second", steps, 2 * steps, resume=second)
    resume = _differences(_checkpoint(first, 2 * steps), _checkpoint(second, 2 * steps))
    return {
        "determinism": {**common, "differences": determinism, "compared_with_the_run": compared},
        "resume": {**common, "differences": resume},
    }


def _train(run: RunFolder, root: Path, every: int, last: int, resume: RunFolder | None = None) -> RunFolder:
    """Trains the configuration of a run below `root` to step `last`, with a checkpoint each `every` steps.

    What the training prints is dropped. Nothing is written outside of `root`, and no process is started. Raises
    Preempted if a signal stopped it.
    """
    changes = {
        "run.root": root,
        "run.mirror": "null",
        "evaluation.suites": "[]",
        "evaluation.every": "null",
        "train.log_every": 1,
        "train.checkpoint_every": every,
        "train.evaluate_every": NEVER,
        "train.keep_last": 2,
        "train.profile": "null",
        "logging.tensorboard": "false",
        "logging.wandb": "false",
        "logging.mlflow": "false",
    }
    config = Config.from_yaml(run.config_snapshot, [f"{key}={value}" for key, value in changes.items()])
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Reached):
            run_all(config, None if resume is None else resume.path, callbacks=[StopAfter(last)])
    except Preempted as error:
        raise Preempted("stopped by a signal while steps of the run were trained again") from error
    (snapshot,) = root.glob("*/config_snapshot.yaml")
    return RunFolder.open(snapshot.parent, writes=False)


def _checkpoint(run: RunFolder, step: int) -> Path:
    return run.checkpoints / f"step-{step:08d}"


def _differences(first: Path, second: Path) -> list[str]:
    comparison = compare(first, second)
    return [] if comparison.identical else list(comparison.lines[1:])


def same_machine(run: RunFolder) -> bool:
    """Whether this process has the machine and the packages of the run, so that the bits must be the same."""
    recorded, now = run.summary().get("environment", {}), environment()
    return all(recorded.get(name) == now[name] for name in SAME_MACHINE)
