"""Runs an ablation: trains every arm of a file at every seed, stores one line of results for each, and makes a table.

Results are stored in the out folder, one JSON object per line, with a hash of everything that determines them. An
interrupted ablation continues after the last stored line, and the run that was interrupted from its newest checkpoint.
Arms that several files share are run once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast, get_args

import torch

import cdrmix
from cdrmix.config.schema import Config
from cdrmix.config.schema_ablation import Ablation
from cdrmix.config.schema_reasoning import EpisodesOfDocuments
from cdrmix.durable import only_process, sha256_file, write_atomically
from cdrmix.errors import ConfigError
from cdrmix.json_text import parse_json
from cdrmix.kernels.common.products import set_num_threads
from cdrmix.reason.build import replayed
from cdrmix.reason.experiments import (  # noqa: F401  # they register themselves
    acceptance,
    operations,
    plasticity,
    state_tracking,
    token_memory,
)
from cdrmix.reason.experiments.base import EXPERIMENTS
from cdrmix.reason.experiments.table import Judgement, Verdict, check, check_lengths, judge, markdown, verdict_line
from cdrmix.reason.experiments.trial import Say, Trial
from cdrmix.runtime import be_deterministic, device_type

RESULTS = "results.jsonl"
UNFINISHED = "unfinished"  # a folder with a folder for each run that was begun
REPLAYING = {  # the phases of each experiment that can replay others
    "plasticity": ("plasticity",),
    "acceptance": ("plasticity",),
    "token_memory": ("imitation", "policy"),
    "operations": ("operations_imitation", "operations"),
}
SECTIONS = {  # of the episodes of each phase
    "plasticity": "plasticity",
    "imitation": "agent",
    "policy": "agent",
    "operations_imitation": "operations",
    "operations": "operations",
}


class Outcome(NamedTuple):
    """The result of an ablation. table: Markdown. measured: arm -> seed -> measurement -> value. seconds: of each run,
    by its mark; files that share arms share marks."""

    name: str
    table: str
    measured: dict[str, dict[int, dict[str, float]]]
    verdicts: tuple[Verdict, ...]
    seconds: dict[str, float]

    @property
    def holds(self) -> bool:
        """Whether every demand holds: "not shown" is not enough."""
        return all(verdict.outcome == "holds" for verdict in self.verdicts)


class Planned(NamedTuple):
    """A file that was read and checked. cells: the configurations of the arms that are to be run."""

    path: Path
    ablation: Ablation
    cells: dict[str, Config]


def read_file(path: str | Path, overrides: Sequence[str] = (), arms: Sequence[str] | None = None) -> Planned:
    """Reads a file with all its arms, so that a mistake in the last one is reported before the first is run.

    Raises ConfigError for a file without an ablation, for demands on arms or measurements that do not exist, and for
    phases that replay what an ablation does not have.
    """
    path = Path(path)
    ablation = Config.from_yaml(path, overrides).ablation
    if ablation is None:
        raise ConfigError(f"{path} has no section `ablation:`; configs/ablations/ has files that do")
    check(ablation)
    wanted = list(ablation.arms) if arms is None else list(arms)
    for arm in wanted:
        if arm not in ablation.arms:
            raise ConfigError(f"{path}: there is no arm {arm!r}; there are {', '.join(ablation.arms)}")
    cells = {arm: _arm(path, section.set, overrides) for arm, section in ablation.arms.items()}
    for arm, cell in cells.items():
        _check_replay(f"{path}, the arm {arm!r}", cell)
    check_lengths(ablation, {arm: cell.ablation for arm, cell in cells.items() if cell.ablation is not None})
    return Planned(path, ablation, {arm: cells[arm] for arm in wanted})


def run(
    path: str | Path,
    overrides: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    out: str | Path | None = None,
    *,
    arms: Sequence[str] | None = None,
    say: Say = print,
) -> Outcome:
    """Run the arms of a file that have no result yet, write the table of all, and return it.

    overrides: applied to every arm. seeds, arms: those alone; None: the file's. out: a folder, by default
        experiments/ablations; the table is its file NAME.md.
    Raises ConfigError as `read_file` does.
    """
    return _run(read_file(path, overrides, arms), seeds, out, say)


def run_folder(
    folder: str | Path,
    overrides: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    out: str | Path | None = None,
    *,
    say: Say = print,
) -> list[Outcome]:
    """`run` for every file NAME.yaml of a folder, in the order of their names; then a line for each verdict and the
    time of all runs. All files are checked before the first arm is run."""
    planned = [read_file(path, overrides) for path in sorted(Path(folder).glob("*.yaml"))]
    if not planned:
        raise ConfigError(f"{folder} has no files NAME.yaml")
    outcomes = [_run(each, seeds, out, say) for each in planned]
    verdicts = [(outcome.name, verdict) for outcome in outcomes for verdict in outcome.verdicts]
    for name, verdict in verdicts:
        say(f"{name}: {verdict_line(verdict)}")
    counts = ", ".join(
        f"{sum(verdict.outcome == word for _, verdict in verdicts)} {word}" for word in get_args(Judgement)
    )
    seconds: dict[str, float] = {}
    for outcome in outcomes:
        seconds |= outcome.seconds
    hours = sum(seconds.values()) / 3600
    say(f"{len(verdicts)} demands: {counts}. The runs took {hours:.2f} hours.")
    return outcomes


def _run(planned: Planned, seeds: Sequence[int] | None, out: str | Path | None, say: Say) -> Outcome:
    name, ablation, cells = planned.path.stem, planned.ablation, planned.cells
    folder = Path("experiments/ablations" if out is None else out)
    folder.mkdir(parents=True, exist_ok=True)
    known = _read(folder / RESULTS, say)
    for mark in known:  # of a process that was killed between the two
        shutil.rmtree(folder / UNFINISHED / mark, ignore_errors=True)
    measured: dict[str, dict[int, dict[str, float]]] = {arm: {} for arm in cells}
    spent: dict[str, float] = {}
    for seed in ablation.seeds if seeds is None else seeds:
        for arm, cell in cells.items():
            mark = fingerprint(cell, seed)
            line = known.get(mark) or _new_line(folder, cell, seed, mark, f"{name}, {arm}", say)
            known[mark] = line
            measured[arm][seed] = {key: float(cast(float, value)) for key, value in _mapping(line["measured"]).items()}
            spent[mark] = float(cast(float, line["seconds"]))
            figures = ", ".join(f"{key} {value:.3f}" for key, value in measured[arm][seed].items())
            say(f"{name}, {arm}, seed {seed}: {figures} ({line['seconds']} s)")
    table = markdown(name, ablation, measured, sum(spent.values()))
    with only_process(folder / f"{name}.lock", lambda: None):
        write_atomically(folder / f"{name}.md", table)
    say(table)
    verdicts = tuple(judge(demand, measured) for demand in ablation.demands)
    return Outcome(name, table, measured, verdicts, spent)


def _new_line(folder: Path, cell: Config, seed: int, mark: str, what: str, say: Say) -> Mapping[str, object]:
    """The result of a run that has none yet, stored. Of two processes, one runs it and the other waits."""
    checkpoints = folder / UNFINISHED / mark
    checkpoints.parent.mkdir(exist_ok=True)

    def waiting() -> None:
        say(f"{what}, seed {seed}: another process runs it; waiting")

    with only_process(checkpoints.with_suffix(".lock"), waiting):
        line = _read(folder / RESULTS, lambda text: None).get(mark)
        if line is None:
            say(f"{what}, seed {seed} ...")
            of_this_code = checkpoints / _code()
            if checkpoints.exists() and not of_this_code.exists():
                say(f"  begins again: {checkpoints} is of another version of the code")
                shutil.rmtree(checkpoints)
            line = _run_one(cell, seed, mark, what, Trial(say, of_this_code))
            _append(folder / RESULTS, line)
        shutil.rmtree(checkpoints, ignore_errors=True)
    return line


@cache
def _code() -> str:
    """A hash of the package's Python files: a run does not go on with other code than it began with."""
    folder, digest = Path(cdrmix.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)} {sha256_file(path)}\n".encode())
    return digest.hexdigest()[:12]


def fingerprint(config: Config, seed: int) -> str:
    """A hash of what determines an arm's result: the seed, and the configuration without names and demands."""
    assert config.ablation is not None
    decisive = config.ablation.model_dump(
        mode="json", include={"experiment", "chunks", "episodes", "difficulty", "harder_chunks", "tracking"}
    )
    parts = [cdrmix.__version__, config.model_copy(update={"run": _run_of(config, seed)}).hash(), decisive]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _run_of(config: Config, seed: int) -> object:
    return config.run.model_copy(update={"seed": seed})


def _arm(path: Path, changes: Sequence[str], overrides: Sequence[str]) -> Config:
    return Config.from_yaml(path, [*changes, *overrides])


def _check_replay(place: str, config: Config) -> None:
    """Raises ConfigError if a phase of the experiment replays what its small models cannot train on."""
    reasoning, ablation = config.reasoning, config.ablation
    assert ablation is not None
    for name in REPLAYING.get(ablation.experiment, ()):
        assert reasoning is not None
        for other in replayed(reasoning, name):
            key = f"{place}: reasoning.phases.{name}.replay has {other!r}"
            if other == "text":
                raise ConfigError(f"{key}; an ablation has no stage A, whose text this is: take it out")
            if other == "operations_imitation" and ablation.experiment != "operations":
                raise ConfigError(f"{key}; the models of this experiment have no operations: take it out")
            own, theirs = SECTIONS[name], SECTIONS[other]
            in_ids, section = getattr(reasoning, own).tokens, getattr(reasoning, theirs)
            if isinstance(section, EpisodesOfDocuments) and section.data is not None:
                raise ConfigError(f"{key}; an ablation is on generated tasks: take out reasoning.{theirs}.data")
            if section.tokens != in_ids:
                kind = f"reasoning.{own}.tokens: {str(in_ids).lower()}"
                raise ConfigError(f"{key}, and {kind}; set reasoning.{theirs}.tokens to the same, and its task")


def _run_one(config: Config, seed: int, mark: str, what: str, trial: Trial) -> dict[str, object]:
    """One arm at one seed, on as many threads as `run.threads` (0: one, which is fastest for small models)."""
    assert config.ablation is not None
    threads, begun = torch.get_num_threads(), time.perf_counter()
    be_deterministic()  # as in the commands that train
    set_num_threads(config.run.threads or 1)
    try:
        measured = EXPERIMENTS[config.ablation.experiment](config, seed, trial)
    finally:
        set_num_threads(threads)
    seconds = round(trial.earlier_seconds + time.perf_counter() - begun, 1)
    where = {
        "device": torch.cuda.get_device_name() if device_type(config.run.device) == "cuda" else "cpu",
        "threads": config.run.threads or 1,
        "torch": torch.__version__.partition("+")[0],
    }
    return {"mark": mark, "what": what, **where, "seed": seed, "seconds": seconds, "measured": measured}


def _append(path: Path, line: Mapping[str, object]) -> None:
    """Appends one line in one write, flushed to the disk. After an incomplete last line it starts a new one."""
    cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("ab") as file:
        file.write(("\n" * cut + json.dumps(line) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, say: Say) -> dict[str, Mapping[str, object]]:
    """The stored results by their marks. A damaged line is left out; its arm is run again."""
    known: dict[str, Mapping[str, object]] = {}
    if not path.exists():
        return known
    for number, text in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            line = parse_json(text)
            known[line["mark"]] = {"measured": _mapping(line["measured"]), "seconds": line["seconds"]}
        except (ValueError, KeyError, TypeError):
            say(f"{path}:{number} is not a result; its arm is run again")
    return known


def _mapping(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError("not a mapping")
    return value
