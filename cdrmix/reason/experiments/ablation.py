"""Runs an ablation: trains every arm of a file at every seed, stores one line of results for each, and makes a table.

Results are stored in the out folder, one JSON object per line, with a hash of everything that determines them. An
interrupted ablation continues after the last stored line. Arms that several files share are run once.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import torch

import cdrmix
from cdrmix.config.schema import Config
from cdrmix.durable import write_atomically
from cdrmix.errors import ConfigError
from cdrmix.kernels.common.products import multiply_on_one_thread, set_num_threads
from cdrmix.reason.experiments import (  # noqa: F401  # they register themselves
    acceptance,
    operations,
    plasticity,
    state_tracking,
    token_memory,
)
from cdrmix.reason.experiments.base import EXPERIMENTS, Say
from cdrmix.reason.experiments.table import Verdict, check, judge, markdown

RESULTS = "results.jsonl"


class Outcome(NamedTuple):
    """The result of an ablation. table: Markdown. measured: arm -> seed -> measurement -> value."""

    name: str
    table: str
    measured: dict[str, dict[int, dict[str, float]]]
    verdicts: tuple[Verdict, ...]

    @property
    def holds(self) -> bool:
        """Whether every demand holds: "not shown" is not enough."""
        return all(verdict.outcome == "holds" for verdict in self.verdicts)


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
    Raises ConfigError for a file without an ablation, and for demands on arms or measurements that do not exist.
    """
    path, folder = Path(path), Path("experiments/ablations" if out is None else out)
    config = Config.from_yaml(path, overrides)
    ablation = config.ablation
    if ablation is None:
        raise ConfigError(f"{path} has no section `ablation:`; configs/ablations/ has files that do")
    check(ablation)
    wanted = list(ablation.arms) if arms is None else list(arms)
    for arm in wanted:
        if arm not in ablation.arms:
            raise ConfigError(f"{path}: there is no arm {arm!r}; there are {', '.join(ablation.arms)}")
    folder.mkdir(parents=True, exist_ok=True)
    # every arm is read before the first is run, so that a mistake in the last one is reported at once
    cells = {arm: _arm(path, ablation.arms[arm].set, overrides) for arm in wanted}
    known = _read(folder / RESULTS, say)
    measured: dict[str, dict[int, dict[str, float]]] = {arm: {} for arm in wanted}
    seconds = 0.0
    for seed in ablation.seeds if seeds is None else seeds:
        for arm, cell in cells.items():
            mark = fingerprint(cell, seed)
            if mark not in known:
                say(f"{path.stem}, {arm}, seed {seed} ...")
                known[mark] = line = _run_one(cell, seed, mark, f"{path.stem}, {arm}", say)
                _append(folder / RESULTS, line)
            line = known[mark]
            measured[arm][seed] = {
                name: float(cast(float, value)) for name, value in _mapping(line["measured"]).items()
            }
            seconds += float(cast(float, line["seconds"]))
            figures = ", ".join(f"{name} {value:.3f}" for name, value in measured[arm][seed].items())
            say(f"{path.stem}, {arm}, seed {seed}: {figures} ({line['seconds']} s)")
    table = markdown(path.stem, ablation, measured, seconds)
    write_atomically(folder / f"{path.stem}.md", table)
    say(table)
    return Outcome(path.stem, table, measured, tuple(judge(demand, measured) for demand in ablation.demands))


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


def _run_one(config: Config, seed: int, mark: str, what: str, say: Say) -> dict[str, object]:
    """One arm at one seed, on as many threads as `run.threads` (0: one, which is fastest for small models)."""
    assert config.ablation is not None
    threads, begun = torch.get_num_threads(), time.perf_counter()
    multiply_on_one_thread()  # as in the commands that train
    set_num_threads(config.run.threads or 1)
    try:
        measured = EXPERIMENTS[config.ablation.experiment](config, seed, say)
    finally:
        set_num_threads(threads)
    seconds = round(time.perf_counter() - begun, 1)
    return {"mark": mark, "what": what, "seed": seed, "seconds": seconds, "measured": measured}


def _append(path: Path, line: Mapping[str, object]) -> None:
    """Appends one line in one write, flushed to the disk. After an incomplete last line it starts a new one."""
    cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("ab") as file:
        file.write(("\n" * cut + json.dumps(line) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, say: Say) -> dict[str, dict[str, object]]:
    """The stored results by their marks. A damaged line is left out; its arm is run again."""
    known: dict[str, dict[str, object]] = {}
    if not path.exists():
        return known
    for number, text in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            line = json.loads(text)
            known[line["mark"]] = {"measured": _mapping(line["measured"]), "seconds": line["seconds"]}
        except (json.JSONDecodeError, KeyError, TypeError):
            say(f"{path}:{number} is not a result; its arm is run again")
    return known


def _mapping(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError("not a mapping")
    return value
