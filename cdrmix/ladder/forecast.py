"""The forecast of the next rung: its held-out loss from the losses of smaller rungs, with a band, and a verdict.

L(C) = E + A C^-a with C the operations of the training. The exponent is pinned, because three points do not determine
it: a = 0.154 is alpha beta / (alpha + beta) of Chinchilla (arXiv 2203.15556, approach 3, alpha 0.34 and beta 0.28). E
and A are fitted by least squares to the last three rungs. The band has the extremes over a in [0.12, 0.18], 1 % on both
sides, and the relative standard deviation over the seeds of a rung of the fit, the largest if several have seeds.

On public losses (arXiv 2403.08540) of models of 79 M to 6.9 B parameters the band held 12 of 12 times, for 12 to 281
times the operations; tests/ladder/test_forecast.py repeats it. From models of 11 M it missed 1 of 4 times. The forecast
is for the held-out loss of the same text and tokenizer, with a similar number of tokens for each parameter.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cdrmix.errors import ConfigError
from cdrmix.ladder.verdict import Outcome

EXPONENT = 0.154
EXPONENTS = (0.12, 0.18)
SLACK = 0.01  # relative, on both sides of the band
LAST_RUNGS, LEAST_RUNGS = 3, 2
GRID = 13  # exponents between the two bounds
# Outside of these the forecast has not been tested; it is made, with a note.
LEAST_PARAMETERS = 50e6
MOST_RATIO_OF_RATIOS = 4.0  # of the largest to the smallest number of tokens per parameter


@dataclass(frozen=True)
class Law:
    """The constants of the forecast. exponents: smallest and largest of the band. slack: relative, on both sides."""

    exponents: tuple[float, float] = EXPONENTS
    slack: float = SLACK

    @property
    def exponent(self) -> float:
        """That of the middle: EXPONENT, or the bound that is nearest to it."""
        low, high = self.exponents
        return min(max(EXPONENT, low), high)


DEFAULT_LAW = Law()


@dataclass(frozen=True)
class Rung:
    """A measured rung.

    compute: operations of the training. losses: the held-out loss of each seed, in nats per token. parameters, tokens:
    None where they are unknown.
    """

    name: str
    compute: float
    losses: tuple[float, ...]
    parameters: float | None = None
    tokens: float | None = None

    @property
    def loss(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.losses)


@dataclass(frozen=True)
class Interval:
    """A forecast loss at some number of operations, with its band."""

    compute: float
    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class Forecast:
    """The forecast of one rung.

    rungs: those below the target, by operations. used: those of the fit. deviation: over the seeds of a rung of the
    fit, relative. at: None with fewer than two rungs. measured: the loss of the target; None: not trained yet. verdict:
    None without a measured loss. notes: in what way the forecast is outside of what has been tested.
    """

    name: str
    rungs: tuple[Rung, ...]
    used: tuple[Rung, ...]
    deviation: float
    at: Interval | None
    measured: float | None
    verdict: Outcome | None
    notes: tuple[str, ...]
    law: Law = DEFAULT_LAW

    def curve(self, points: int = 60) -> list[Interval]:
        """The law with its band from the first used rung to the target, evenly in the logarithm of the operations."""
        if self.at is None:
            return []
        first, last = self.used[0].compute, self.at.compute
        computes = [first * (last / first) ** (index / (points - 1)) for index in range(points)]
        return [interval(self.used, compute, self.deviation, self.law) for compute in computes]


def forecast(
    rungs: Sequence[Rung], name: str, compute: float, measured: float | None = None, law: Law = DEFAULT_LAW
) -> Forecast:
    """Forecasts the loss of a rung, and compares it with the measured loss if there is one.

    Args:
        rungs: measured rungs. Those that do not have fewer operations than the target are left out.
        name, compute: of the target.
        measured: the target's own loss, in nats per token.
        law: the exponents and the slack of the band.

    Returns:
        The forecast. Its verdict is FAIL for a measured loss above the band, HOLD for one below it (is held-out text in
        the training text?), NOT_MEASURED with fewer than two rungs.

    Raises:
        ConfigError: two rungs have the same number of operations.
    """
    below = tuple(sorted((rung for rung in rungs if rung.compute < compute), key=lambda rung: rung.compute))
    for one, other in itertools.pairwise(below):
        if one.compute == other.compute:
            raise ConfigError(
                f"the rungs {one.name} and {other.name} have the same compute, {one.compute:g}: give the seeds of one "
                "rung one name"
            )
    if len(below) < LEAST_RUNGS:
        missing = f"a forecast takes at least {LEAST_RUNGS} measured rungs below {name}; there are {len(below)}"
        return Forecast(name, below, below, 0.0, None, measured, Outcome.NOT_MEASURED, (missing,), law)
    used = below[-LAST_RUNGS:]
    deviation = _deviation(used)
    at = interval(used, compute, deviation, law)
    verdict = None
    if measured is not None:
        verdict = Outcome.FAIL if measured > at.high else Outcome.HOLD if measured < at.low else Outcome.PASS
    return Forecast(name, below, used, deviation, at, measured, verdict, tuple(_notes(used)), law)


def interval(rungs: Sequence[Rung], compute: float, deviation: float, law: Law = DEFAULT_LAW) -> Interval:
    """The law of the rungs at some number of operations, with its band. deviation: relative, widens the band."""
    low, high = law.exponents
    exponents = [low + (high - low) * index / (GRID - 1) for index in range(GRID)]
    losses = [_law(rungs, compute, exponent) for exponent in exponents]
    margin = law.slack + deviation
    return Interval(compute, _law(rungs, compute, law.exponent), min(losses) * (1 - margin), max(losses) * (1 + margin))


def _law(rungs: Sequence[Rung], compute: float, exponent: float) -> float:
    """E + A C^-a with E and A by least squares. Operations are relative to the first rung's, which changes only A."""
    first = rungs[0].compute
    x = [(rung.compute / first) ** -exponent for rung in rungs]
    slope, intercept = statistics.linear_regression(x, [rung.loss for rung in rungs])
    return intercept + slope * (compute / first) ** -exponent


def _deviation(used: Sequence[Rung]) -> float:
    """The largest sample standard deviation over the seeds of a rung of the fit, relative to their mean.

    0 where no rung has several seeds.
    """
    several = [rung for rung in used if len(rung.losses) > 1]
    return max((statistics.stdev(rung.losses) / rung.loss for rung in several), default=0.0)


def _notes(used: Sequence[Rung]) -> list[str]:
    notes = []
    for one, other in itertools.pairwise(used):
        if other.loss >= one.loss:
            notes.append(
                f"{other.name} has more operations than {one.name}, but no lower loss: look at these runs first"
            )
    small = [rung.name for rung in used if rung.parameters is not None and rung.parameters < LEAST_PARAMETERS]
    if small:
        notes.append(f"{', '.join(small)}: below {LEAST_PARAMETERS / 1e6:g} M parameters; there the band is not tested")
    known = [rung.tokens / rung.parameters for rung in used if rung.tokens and rung.parameters]
    if known and max(known) > MOST_RATIO_OF_RATIOS * min(known):
        notes.append(
            f"the rungs have {min(known):.3g} to {max(known):.3g} tokens a parameter; the law is for a ratio that "
            f"differs by at most {MOST_RATIO_OF_RATIOS:g}"
        )
    return notes
