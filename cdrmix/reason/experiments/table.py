"""The table of an ablation: means with intervals over seeds, differences of arms, and a verdict on every demand.

Intervals are Student's two-sided 95 % intervals, with one degree of freedom less than there are seeds. A difference of
two arms is paired by seed, because the arms of one seed share their data and their initial weights. A verdict depends
on the whole interval:

    holds       every value of the interval meets the demand
    not shown   the bound lies inside the interval, or there is one seed and therefore no interval
    fails       no value of the interval meets the demand
    not run     the arms have no seed in common
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cdrmix.config.schema_ablation import Ablation, Demand
from cdrmix.errors import ConfigError

CONFIDENCE = 0.95

Judgement = Literal["holds", "not shown", "fails", "not run"]

Measured = Mapping[str, Mapping[int, Mapping[str, float]]]  # arm -> seed -> measurement -> value


class Estimate(NamedTuple):
    """A mean over seeds, the half width of its interval (None for one seed), and the number of seeds."""

    mean: float
    half: float | None
    seeds: int

    @property
    def low(self) -> float:
        """The lower end of the interval; -inf for one seed."""
        return -math.inf if self.half is None else self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end of the interval; inf for one seed."""
        return math.inf if self.half is None else self.mean + self.half

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.half is None else f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Verdict:
    """A demand, the estimate of its quantity (None if an arm was not run), and the outcome."""

    demand: Demand
    estimate: Estimate | None
    outcome: Judgement


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
    """Mean and interval of values, one for each seed."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None, 1)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return Estimate(mean, student_quantile(count - 1) * deviation / math.sqrt(count), count)


def judge(demand: Demand, measured: Measured) -> Verdict:
    """The verdict on a demand; NaN fails. Raises ConfigError for a measurement that the experiment does not have."""
    minus_arm = demand.minus_arm or demand.arm
    seeds = sorted(measured.get(demand.arm, {}).keys() & measured.get(minus_arm, {}).keys())
    if not seeds:
        return Verdict(demand, None, "not run")
    values = []
    for seed in seeds:
        value = _of(measured[demand.arm][seed], demand.of)
        if demand.is_difference:
            value -= demand.times * _of(measured[minus_arm][seed], demand.minus_of or demand.of)
        values.append(value)
    quantity = estimate(values)
    return Verdict(demand, quantity, _outcome(demand, quantity))


def _outcome(demand: Demand, quantity: Estimate) -> Judgement:
    least = -math.inf if demand.at_least is None else demand.at_least
    most = math.inf if demand.at_most is None else demand.at_most
    if math.isnan(quantity.mean) or quantity.high < least or quantity.low > most:
        return "fails"
    return "holds" if least <= quantity.low and quantity.high <= most else "not shown"


def _of(values: Mapping[str, float], name: str) -> float:
    if name not in values:
        raise ConfigError(f"ablation.demands: nothing measures {name!r}; there are {', '.join(sorted(values))}")
    return values[name]


def check(ablation: Ablation) -> None:
    """Checks the demands before anything is run. Raises ConfigError for an unknown arm and for a missing bound."""
    for index, demand in enumerate(ablation.demands):
        for arm in (demand.arm, demand.minus_arm):
            if arm is not None and arm not in ablation.arms:
                raise ConfigError(
                    f"ablation.demands[{index}]: there is no arm {arm!r}; there are {', '.join(ablation.arms)}"
                )
        if demand.at_least is None and demand.at_most is None:
            raise ConfigError(f"ablation.demands[{index}]: it demands nothing; give at_least or at_most")


def check_lengths(ablation: Ablation, of_arms: Mapping[str, Ablation]) -> None:
    """Checks that each demand on NAME@N is on an arm that is measured at N. of_arms: the section of every arm, whose
    overrides can change it. Raises ConfigError."""
    for index, demand in enumerate(ablation.demands):
        for arm, name in (demand.arm, demand.of), (demand.minus_arm or demand.arm, demand.minus_of or demand.of):
            own = of_arms[arm]
            key, lengths = "ablation.chunks", [*own.chunks, *own.harder_chunks]
            if own.experiment == "tracking":
                key, lengths = "ablation.tracking.lengths", own.tracking.lengths
            _, at, length = name.partition("@")
            if at and length not in map(str, lengths):
                raise ConfigError(
                    f"ablation.demands[{index}]: it is on {name} of {arm!r}, which {key} measures at"
                    f" {', '.join(map(str, lengths))}"
                )


def claim_of(demand: Demand) -> tuple[str, str]:
    """A demand as text: what is measured, and its bounds."""
    quantity = f"{demand.arm}, {demand.of}"
    if demand.is_difference:
        times = "" if demand.times == 1 else f"{demand.times:g} x "
        quantity += f" minus {times}{demand.minus_arm or demand.arm}, {demand.minus_of or demand.of}"
    bounds = [f"at least {demand.at_least:g}"] if demand.at_least is not None else []
    bounds += [f"at most {demand.at_most:g}"] if demand.at_most is not None else []
    return quantity, " and ".join(bounds)


def verdict_line(verdict: Verdict) -> str:
    """A demand and its outcome as one line."""
    quantity, bounds = claim_of(verdict.demand)
    estimated = verdict.estimate
    if estimated is None:
        return f"{quantity}: {bounds}: not run"
    interval = (
        "one seed: no interval"
        if estimated.half is None
        else f"95 % from {estimated.low:.3f} to {estimated.high:.3f}, {estimated.seeds} seeds"
    )
    return f"{quantity}: {estimated.mean:.3f} ({interval}), {bounds}: {verdict.outcome.upper()}"


def markdown(name: str, ablation: Ablation, measured: Measured, seconds: float) -> str:
    """The outcome as a section of a Markdown document; the command prints the same text."""
    lines = section_lines(name, ablation, measured)
    lines += [f"- {verdict_line(judge(demand, measured))}" for demand in ablation.demands]
    lines += [] if ablation.demands else ["- no demands: measured only"]
    lines += ["", f"{sum(map(len, measured.values()))} runs, {seconds:.0f} s in all.", ""]
    return "\n".join(lines)


def section_lines(name: str, ablation: Ablation, measured: Measured) -> list[str]:
    """Lines of Markdown: the heading, the claim, the arms, and the table of all measurements."""
    lines = [f"## {name} (row {ablation.row})", "", f"Claim under test: {ablation.shows}", ""]
    lines += [f"- `{arm}`: {section.says}" for arm, section in ablation.arms.items()]
    return [*lines, "", *arms_table(ablation, measured), ""]


def arms_table(ablation: Ablation, measured: Measured, kinds: Sequence[str] | None = None) -> list[str]:
    """Lines of a table: a row for each arm and kind of measurement, a column for each length at which it was measured.

    A measurement's name is kind@length. kinds: only these, in this order; None: all, in the order of the experiment.
    """
    names = list(dict.fromkeys(name for runs in measured.values() for run in runs.values() for name in run))
    measured_kinds = list(dict.fromkeys(name.partition("@")[0] for name in names))
    kinds = measured_kinds if kinds is None else [kind for kind in kinds if kind in measured_kinds]
    lengths = sorted(
        {name.partition("@")[2] for name in names if name.partition("@")[0] in kinds},
        key=lambda length: (len(length), length),
    )
    rows = []
    for arm in ablation.arms:
        runs = measured.get(arm, {})
        if not runs:
            rows.append([arm, "none", "not run", *["-"] * len(lengths)])
        for kind in kinds:
            cells = []
            for length in lengths:
                column = f"{kind}@{length}" if length else kind
                values = [run[column] for run in runs.values() if column in run]
                cells.append(str(estimate(values)) if values else "-")
            if any(cell != "-" for cell in cells):
                rows.append([arm, ", ".join(map(str, sorted(runs))), kind, *cells])
    head = ["arm", "seeds", "measured", *(f"@{length}" if length else "value" for length in lengths)]
    return table([head, *rows])


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, its columns aligned; the first row is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    ruled = [rows[0], ["-" * width for width in widths], *rows[1:]]
    return [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in ruled
    ]
