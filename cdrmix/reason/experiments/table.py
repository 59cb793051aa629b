"""The table of an ablation: means with intervals over seeds, differences of arms, demands that hold or do not.

Intervals are Student's of 95 %, two-sided, with one degree of freedom less than there are seeds. A difference of two
arms is taken seed by seed, as the arms of one seed share their data and their first weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cdrmix.config.schema_ablation import Ablation, Demand
from cdrmix.errors import ConfigError

CONFIDENCE = 0.95

Measured = Mapping[str, Mapping[int, Mapping[str, float]]]  # arm -> seed -> measurement -> value


class Estimate(NamedTuple):
    """A mean over seeds and the half width of its interval; None for one seed, which has none."""

    mean: float
    half: float | None
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.half is None else f"{self.mean:.3f} ± {self.half:.3f}"


@dataclass(frozen=True)
class Verdict:
    """A demand, what was measured of it, and whether it holds; None where an arm has not been run."""

    demand: Demand
    estimate: Estimate | None
    holds: bool | None


def student_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """t with P(|T| <= t) = confidence for Student's distribution, by bisection of its closed form."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if student_within(middle, freedom) < confidence else (low, middle)
    return (low + high) / 2


def student_within(t: float, freedom: int) -> float:
    """P(|T| <= t) of Student's distribution (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, total = math.cos(angle), 0.0
    term = cosine if freedom % 2 else 1.0
    for power in range(freedom % 2, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    if freedom % 2 == 0:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + math.sin(angle) * total)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval of one value a seed."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None, 1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return Estimate(mean, student_quantile(count - 1) * deviation / math.sqrt(count), count)


def judge(demand: Demand, measured: Measured) -> Verdict:
    """Whether what was measured meets a demand. Raises ConfigError for a measurement that the experiment has not."""
    other = demand.minus_arm or demand.arm
    if not measured.get(demand.arm) or not measured.get(other):
        return Verdict(demand, None, None)
    seeds = sorted(measured[demand.arm].keys() & measured[other].keys())
    if not seeds:
        return Verdict(demand, None, None)
    values = []
    for seed in seeds:
        value = _of(measured[demand.arm][seed], demand.of)
        if demand.is_difference:
            value -= demand.times * _of(measured[other][seed], demand.minus_of or demand.of)
        values.append(value)
    found = estimate(values)
    if any(math.isnan(value) for value in values):
        return Verdict(demand, found, False)
    holds = (demand.at_least is None or found.mean >= demand.at_least) and (
        demand.at_most is None or found.mean <= demand.at_most
    )
    if demand.is_difference and found.half is not None:
        if demand.at_least is not None and demand.at_least > 0:
            holds &= found.mean - found.half > 0
        if demand.at_most is not None and demand.at_most < 0:
            holds &= found.mean + found.half < 0
    return Verdict(demand, found, holds)


def _of(values: Mapping[str, float], name: str) -> float:
    if name not in values:
        raise ConfigError(f"ablation.demands: nothing measures {name!r}; there are {', '.join(sorted(values))}")
    return values[name]


def check(ablation: Ablation) -> None:
    """Raises ConfigError for a demand that names no arm or asks for nothing: before hours are spent on it."""
    for place, demand in enumerate(ablation.demands):
        for arm in (demand.arm, demand.minus_arm):
            if arm is not None and arm not in ablation.arms:
                raise ConfigError(
                    f"ablation.demands[{place}]: there is no arm {arm!r}; there are {', '.join(ablation.arms)}"
                )
        if demand.at_least is None and demand.at_most is None:
            raise ConfigError(f"ablation.demands[{place}]: it demands nothing; give at_least or at_most")


def in_words(verdict: Verdict) -> str:
    """A demand and its outcome as one line."""
    demand = verdict.demand
    said = f"{demand.arm}, {demand.of}"
    if demand.is_difference:
        times = "" if demand.times == 1 else f"{demand.times:g} x "
        said += f" minus {times}{demand.minus_arm or demand.arm}, {demand.minus_of or demand.of}"
    bounds = [f"at least {demand.at_least:g}"] if demand.at_least is not None else []
    bounds += [f"at most {demand.at_most:g}"] if demand.at_most is not None else []
    found = verdict.estimate
    if found is None:
        return f"{said}: {' and '.join(bounds)}: not run"
    interval = (
        "one seed: no interval"
        if found.half is None
        else f"95 % from {found.mean - found.half:.3f} to {found.mean + found.half:.3f}, {found.seeds} seeds"
    )
    outcome = "holds" if verdict.holds else "DOES NOT HOLD"
    return f"{said}: {found.mean:.3f} ({interval}), {' and '.join(bounds)}: {outcome}"


def markdown(name: str, ablation: Ablation, measured: Measured, seconds: float) -> str:
    """The whole outcome as a section of a document; also what a person reads at the console."""
    names = _columns(measured)
    head = ["arm", "seeds", *names]
    rows = []
    for arm, section in ablation.arms.items():
        runs = measured.get(arm, {})
        cells = []
        for column in names:
            values = [run[column] for run in runs.values() if column in run]
            cells.append(str(estimate(values)) if values else "-")
        rows.append([f"{arm}: {section.says}", str(len(runs)), *cells])
    widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]
    lines = [f"## {name} (row {ablation.row})", "", ablation.shows, ""]
    lines += [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in [head, ["-" * width for width in widths], *rows]
    ]
    lines.append("")
    lines += [f"- {in_words(judge(demand, measured))}" for demand in ablation.demands]
    lines += [] if ablation.demands else ["- nothing is demanded: reported"]
    lines += ["", f"{sum(map(len, measured.values()))} runs, {seconds:.0f} s in all.", ""]
    return "\n".join(lines)


def _columns(measured: Measured) -> list[str]:
    """Every measurement, in the order in which the experiments gave them."""
    found: dict[str, None] = {}
    for runs in measured.values():
        for run in runs.values():
            found.update(dict.fromkeys(run))
    return list(found)
