"""The rows of eval/metrics.jsonl of a run: what suites measured on its checkpoints while the training went on.

A row is a JSON object:

    step, sha256    the checkpoint, and the SHA-256 of its weights as its manifest has it
    suite           null for a checkpoint of which no suite was begun
    status          measured; failed; skipped: a newer checkpoint came first; interrupted: the process was killed;
                    stopped: the process was told to end
    reason          why it was not measured, else null
    measures        name, value, low and high of the 95 % interval, count, problem; as in `cdrmix eval --suite --json`
    facts, notes    of the suite
    options         of the suite
    seconds, time   duration, and the UTC time of the end
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cdrmix.records import Count, Measured, complete_lines, damaged, read_line

Row = Mapping[str, Any]


@dataclass(frozen=True)
class _Measure:
    name: str
    value: Measured
    low: Measured = None
    high: Measured = None
    count: Count = 0
    problem: str | None = None


@dataclass(frozen=True)
class _Row:
    """What readers need of a row."""

    step: Count
    status: str
    sha256: str | None = None
    suite: str | None = None
    reason: str | None = None
    measures: list[_Measure] = field(default_factory=list)
    options: Any = None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of an eval/metrics.jsonl; none without the file. A line that is incomplete after a kill is left out.

    Raises ConfigError, which names the line and the key, if the file is damaged.
    """
    rows = []
    for line in complete_lines(path):
        row = dataclasses.asdict(read_line(line, _Row))
        if row["status"] == "measured" and row["suite"] is None:
            raise damaged(line, "suite: found null; allowed for the status measured: a name")
        rows.append(line.data() | row)
    return rows


def measured(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The measured rows of each suite, in order of step; of one step the last one."""
    of_suites: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["status"] == "measured":
            of_suites.setdefault(row["suite"], {})[row["step"]] = row
    return {suite: [of_steps[step] for step in sorted(of_steps)] for suite, of_steps in sorted(of_suites.items())}


def last_results(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The newest measured row of each suite without its facts, for the summary of the run."""
    keys = ("step", "sha256", "measures", "options")
    return {suite: {key: of_suite[-1].get(key) for key in keys} for suite, of_suite in measured(rows).items()}


def lines(results: Mapping[str, Row]) -> list[str]:
    """`last_results` as aligned lines: suite, step, measure, value and interval."""
    cells = [
        (f"{suite} (step {row['step']})", measure["name"], figure(measure))
        for suite, row in results.items()
        for measure in row["measures"]
    ]
    widths = [max(map(len, column)) for column in list(zip(*cells, strict=True))[:2]]
    return [f"  {suite:<{widths[0]}}  {name:<{widths[1]}}  {value}" for suite, name, value in cells]


def figure(measure: Mapping[str, Any]) -> str:
    """The value of a measure with its interval, or why there is none."""
    if measure["value"] is None:
        return f"not measured: {measure.get('problem')}"
    known = measure.get("low") is not None and measure.get("high") is not None
    return f"{measure['value']:.3f}" + (f" ({measure['low']:.3f} to {measure['high']:.3f})" if known else "")


def scalars(row: Row) -> dict[str, float]:
    """The figures of a measured row, such as `eval/code/compile_rate`, with `/low` and `/high`; {} for other rows."""
    flat: dict[str, float] = {}
    for measure in row.get("measures") or ():
        name = f"eval/{row['suite']}/{measure['name']}"
        for key, suffix in (("value", ""), ("low", "/low"), ("high", "/high")):
            if measure.get(key) is not None:
                flat[name + suffix] = measure[key]
    return flat
