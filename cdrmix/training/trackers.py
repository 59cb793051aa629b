"""Where records go: metrics.jsonl always; TensorBoard, Weights & Biases and MLflow where `logging` says so."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.eval.rows import read_rows
from cdrmix.eval.rows import scalars as row_scalars
from cdrmix.records import Record, end_last_line, read_records
from cdrmix.run_folder import RECORDED, RunFolder, finite
from cdrmix.training.callbacks import Callback
from cdrmix.training.metrics import scalars

PASSED = "evaluations_logged"  # keys of metrics.json
ACTIVE = "trackers"  # those of the last start
KEEPING = ("wandb", "mlflow")  # trackers that cannot forget the records of a step


class Tracker(Protocol):
    """Takes records, and figures of suites on a checkpoint of a step, which come later than the record of the step."""

    def write(self, record: Record) -> None: ...

    def write_evaluation(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers(Callback):
    """All trackers of a run. A context manager.

    Raises ConfigError, before the first step, when a tracker's package is not installed.
    """

    def __init__(self, run: RunFolder, config: Config) -> None:
        self._trackers: dict[str, Tracker] = {}
        self._run, self._evaluated, self._read = run, False, 0
        self._known: dict[str, int] = {}
        if not run.writes:
            return
        check_trackers(config)
        names = [name for name in TRACKERS if getattr(config.logging, name)]
        summary = run.summary()
        # A run that was killed makes the steps after its checkpoint again. Its services have their records.
        repeated = [name for name in KEEPING if name in summary.get(ACTIVE, [])]
        self._known = dict.fromkeys(repeated, summary.get(RECORDED, 0))
        self._trackers = {"metrics.jsonl": JsonLines(run)} | {name: TRACKERS[name](run, config) for name in names}
        self._evaluated = bool(names)
        if names or ACTIVE in summary:
            run.update_summary({ACTIVE: names})

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def on_record(self, record: Record) -> None:
        """Passes a record to every tracker, and the results of suites that are new."""
        for name, tracker in self._trackers.items():
            if record.step > self._known.get(name, 0):
                tracker.write(record)
        self._pass_evaluations()

    def _pass_evaluations(self) -> None:
        path = self._run.evaluation_rows
        size = path.stat().st_size if self._evaluated and path.is_file() else 0
        if size == self._read:  # looked at for each record
            return
        self._read = size
        rows = new_evaluations(self._run)
        for row in rows:
            if figures := row_scalars(row):
                for tracker in self._trackers.values():
                    tracker.write_evaluation(row["step"], figures)
        passed = self._run.summary().get(PASSED, 0) + len(rows)
        self._run.update_summary({PASSED: passed})

    def close(self) -> None:
        """Passes on the results of suites that are new; flushes and closes every tracker. May be called again."""
        if self._trackers:
            self._pass_evaluations()
        while self._trackers:
            self._trackers.popitem()[1].close()


class JsonLines:
    """metrics.jsonl: one JSON object a record. It is opened for each, since a rollback replaces it."""

    def __init__(self, run: RunFolder) -> None:
        self._path = run.metrics_jsonl
        end_last_line(self._path)  # a killed run may have left half of one

    def write(self, record: Record) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(dataclasses.asdict(record)), allow_nan=False) + "\n")

    def write_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        pass  # eval/metrics.jsonl has them

    def close(self) -> None:
        pass


class TensorBoard:
    """Scalars for TensorBoard, in the run folder's tensorboard/."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        _package("tensorboard")
        self._folder = run.path / "tensorboard"
        self._last = read_records(run.metrics_jsonl).last
        self._writer = self._open(self._last + 1 if self._folder.exists() else None)

    def _open(self, purge_step: int | None) -> Any:
        """purge_step: from which on TensorBoard forgets what was written before; None: nothing was."""
        module = importlib.import_module("torch.utils.tensorboard")
        return module.SummaryWriter(str(self._folder), purge_step=purge_step)

    def write(self, record: Record) -> None:
        if record.step <= self._last:  # the run went back to a checkpoint
            self._writer.close()
            self._writer = self._open(record.step)
        self._last = record.step
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step)

    def write_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Scalars for Weights & Biases. The run id is the folder's name, so a resumed run continues it."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        wandb = _package("wandb")
        self._run = wandb.init(
            project="cdrmix",
            name=f"{config.run.name}-{run.path.name}",
            id=run.path.name,
            resume="allow",
            dir=str(run.path),
            config=config.model_dump(mode="json"),
        )
        # Steps of our own. W&B's counts each call, also those with figures of suites, which come later than the
        # records of their step; and it drops what has a step that its own has passed.
        self._run.define_metric("*", step_metric="step")
        self._evaluations: set[str] = set()

    def write(self, record: Record) -> None:
        self._run.log({"step": record.step, **scalars(record)})

    def write_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        for name in figures.keys() - self._evaluations:
            self._run.define_metric(name, step_metric="eval/step")  # goes before the pattern above
        self._evaluations |= figures.keys()
        self._run.log({"eval/step": step, **figures})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Metrics for MLflow. MLFLOW_TRACKING_URI names the tracking server."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        self._mlflow = _package("mlflow")
        self._mlflow.set_experiment("cdrmix")
        known = run.summary().get("mlflow_run")
        active = self._mlflow.start_run(run_id=known) if known else self._mlflow.start_run(run_name=run.path.name)
        run.update_summary({"mlflow_run": active.info.run_id})

    def write(self, record: Record) -> None:
        self._mlflow.log_metrics(scalars(record), step=record.step)

    def write_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        # A name in MLflow has no character like the @ of pass@1.
        self._mlflow.log_metrics({re.sub(r"[^\w./ -]", "_", name): value for name, value in figures.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


# By package name, which is also the key under `logging`.
TRACKERS: dict[str, Callable[[RunFolder, Config], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def new_evaluations(run: RunFolder) -> list[dict[str, Any]]:
    """The rows of eval/metrics.jsonl that no tracker has got. What trackers have got is counted in metrics.json."""
    return read_rows(run.evaluation_rows)[run.summary().get(PASSED, 0) :]


def log_evaluations(run: RunFolder, config: Config) -> None:
    """Passes results of suites that came after the training to the trackers of `logging`."""
    if any(getattr(config.logging, name) for name in TRACKERS) and any(map(row_scalars, new_evaluations(run))):
        Trackers(run, config).close()


def check_trackers(config: Config) -> None:
    """Raises ConfigError when `logging` asks for a package that is not installed; imports none of them."""
    missing = [name for name in TRACKERS if getattr(config.logging, name) and not _is_installed(name)]
    if missing:
        raise ConfigError("\n  ".join(_how_to_install(name) for name in missing))


def _is_installed(name: str) -> bool:
    # An imported module may have no spec, for which find_spec raises.
    return sys.modules.get(name) is not None or importlib.util.find_spec(name) is not None


def _package(name: str) -> Any:
    if not _is_installed(name):
        raise ConfigError(_how_to_install(name))
    return importlib.import_module(name)


def _how_to_install(name: str) -> str:
    return (
        f"logging.{name}: true needs the package {name}, which is not installed: pip install {name} (or, in the "
        f"project's checkout, pip install -e '.[{name}]'), or set logging.{name}: false"
    )
