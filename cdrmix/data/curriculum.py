"""The curriculum: the row of the shards at a position of the training, as a function of the position only.

A stage has a weight for every stratum (a domain and a length class). A pattern of PERIOD slots, repeated, assigns the
positions of the stage to the strata. The slots of a stratum are spread evenly: among the first n positions of the
stage, its number of rows differs from its exact share by less than one. So the proportions hold in every window and not
only on average. Occurrence n of a stratum, counted over the whole training, is row n of an order of the stratum: a
keyed permutation for each epoch. There is no state between positions.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from cdrmix.config import schema_data as schema
from cdrmix.config.schema import Config
from cdrmix.data.permutation import permute_each
from cdrmix.data.shards import Split, Stratum
from cdrmix.errors import ConfigError

PERIOD = 2**16  # slots: shares are multiples of 1/65,536
FITTING_ROUNDS = 200  # of iterative proportional fitting; weights that do not converge are refused
TOLERANCE = 0.005  # allowed difference between the share and the weight of a length class

Array = np.ndarray[Any, np.dtype[Any]]


class Stage(NamedTuple):
    """A stage: its first position, its number of rows, and the slots of the period of each stratum."""

    start: int
    rows: int
    slots: list[int]


class Mixture:
    """The row of each position, for a training of `total_rows` rows. The last stage continues after its end.

    stages: at least one, as in data.curriculum. strata: of the split. limits: domain -> maximum number of epochs.

    Raises ConfigError for a domain or a length class with a weight and without rows, and for a domain with more epochs
    than its limit.
    """

    def __init__(
        self,
        stages: Sequence[schema.CurriculumStage],
        strata: Sequence[Stratum],
        *,
        total_rows: int,
        seed: int,
        limits: Mapping[str, float] | None = None,
        name: str = "data.curriculum",
    ) -> None:
        self.strata = [*strata]
        self.seed, self.total_rows = seed, total_rows
        self.stages = _stages(stages, strata, total_rows, name)
        _check_limits(stages, strata, total_rows, limits or {}, name)
        self._starts = np.array([stage.start for stage in self.stages], np.int64)
        patterns = [
            interleave(np.array(stage.slots, np.int64), _pattern_key(seed, at)) for at, stage in enumerate(self.stages)
        ]
        self._strata = np.stack([pattern[0] for pattern in patterns])  # [stages, PERIOD]
        self._occurrences = np.stack([pattern[1] for pattern in patterns])
        self._slots = np.array([stage.slots for stage in self.stages], np.int64)  # [stages, strata]
        taken = [self._taken_in(at, stage.rows) for at, stage in enumerate(self.stages)]
        self._taken_before = np.cumsum([np.zeros_like(taken[0]), *taken], axis=0)[:-1]  # [stages, strata]
        self._rows = np.array([stratum.rows for stratum in strata], np.int64)
        self._first_rows = np.array([stratum.first_row for stratum in strata], np.int64)

    def stratum_of(self, positions: Array) -> tuple[Array, Array]:
        """(stratum, occurrence), int64 [n] each: the stratum of a position, and how often it occurred before."""
        positions = np.asarray(positions, np.int64)
        if len(positions) and positions.min() < 0:
            raise IndexError(f"position {positions.min()} is negative")
        stages = np.searchsorted(self._starts, positions, "right") - 1
        periods, slots = np.divmod(positions - self._starts[stages], PERIOD)
        strata = self._strata[stages, slots].astype(np.int64)
        before = self._taken_before[stages, strata] + periods * self._slots[stages, strata]
        return strata, before + self._occurrences[stages, slots]

    def rows(self, positions: Array) -> Array:
        """int64 [n]: the row of the split at each of `positions`, int64 [n]."""
        strata, occurrences = self.stratum_of(positions)
        epochs, within = np.divmod(occurrences, self._rows[strata])
        orders, which = np.unique(np.stack([strata, epochs]), axis=1, return_inverse=True)
        keys = [(self.seed, epoch, stratum) for stratum, epoch in orders.T.tolist()]
        sizes = self._rows[orders[0]].tolist()
        return self._first_rows[strata] + permute_each(within, which.reshape(-1), sizes, keys)

    def lines(self) -> list[str]:
        """A summary: the share of each domain in each stage, and the epochs of each domain."""
        lines = []
        for at, stage in enumerate(self.stages):
            shares = ", ".join(f"{name} {share:.1%}" for name, share in self._by_domain(stage.slots).items())
            lines.append(f"stage {at + 1} of {len(self.stages)}, {stage.rows:,} rows from {stage.start:,} on: {shares}")
        rows = [_rows_of(self.stages, number) for number in range(len(self.strata))]
        taken = self._by_domain(rows, 1)
        there = self._by_domain([stratum.rows for stratum in self.strata], 1)
        epochs = ", ".join(f"{name} {taken[name] / there[name]:.2f}" for name in taken if there[name])
        return [*lines, f"epochs over the training: {epochs}"]

    def _by_domain(self, values: Sequence[float], whole: float = PERIOD) -> dict[str, float]:
        sums = dict.fromkeys((stratum.domain for stratum in self.strata), 0.0)
        for stratum, value in zip(self.strata, values, strict=True):
            sums[stratum.domain] += value / whole
        return sums

    def _taken_in(self, stage: int, rows: int) -> Array:
        """int64 [strata]: the number of rows of each stratum among the first `rows` rows of a stage."""
        periods, slots = divmod(rows, PERIOD)
        rest = np.bincount(self._strata[stage, :slots], minlength=len(self.strata))
        return periods * self._slots[stage] + rest


def make_mixture(config: Config, split: Split) -> Mixture | None:
    """The mixture of a configuration. None without data.curriculum: then all rows are equal.

    Raises ConfigError as Mixture, also without a curriculum.
    """
    train, sizes = config.train, config.train.batch_sizes
    total_rows = sizes.before(train.steps)
    limits = {
        name: domain.max_epochs for name, domain in config.data.all_domains().items() if domain.max_epochs is not None
    }
    key, stages = config.data.stages()
    if stages:
        seed = config.run.seed
        return Mixture(stages, split.strata, total_rows=total_rows, seed=seed, limits=limits, name=key)
    for name, limit in limits.items():
        if total_rows > limit * split.rows:
            fitting = bisect.bisect_right(range(train.steps), int(limit * split.rows), key=sizes.before) - 1
            raise ConfigError(
                f"data.domains.{name}.max_epochs={limit:g}: the training takes {total_rows:,} rows of the "
                f"{split.rows:,} available rows, {total_rows / split.rows:.2f} times each; lower train.steps to "
                f"{fitting}, give the domain less weight by "
                "data.curriculum, or raise the limit"
            )
    return None


def stratum_weights(
    stage: schema.CurriculumStage, strata: Sequence[Stratum], name: str = "data.curriculum"
) -> list[float]:
    """The shares of the strata in a stage: their numbers of rows, fitted to the weights of domains and lengths. Sum: 1.

    Iterative proportional fitting (Deming and Stephan 1940): the table with these margins that is closest to the
    available rows. name: of the stage, for messages.

    Raises ConfigError if a weight has no rows, or if both margins cannot be satisfied together.
    """
    domains = None if stage.domains is None else _shares(stage.domains)
    lengths = None if stage.lengths is None else _shares(dict(enumerate(stage.lengths)))
    weights = [float(stratum.rows) for stratum in strata]
    margins: list[tuple[str, Mapping[Any, float], list[Any]]] = []
    if lengths is not None:
        margins.append(("lengths", lengths, [stratum.length_class for stratum in strata]))
    if domains is not None:  # last, so that the shares of the domains are always exact
        margins.append(("domains", domains, [stratum.domain for stratum in strata]))
    for round_ in range(FITTING_ROUNDS if len(margins) > 1 else 1):
        before = weights
        for margin, wanted, groups in margins:
            sums = {
                group: math.fsum(w for w, of in zip(weights, groups, strict=True) if of == group) for group in wanted
            }
            for group, share in wanted.items():
                if share > 0 and not sums[group]:
                    among = "" if round_ == 0 and margin == margins[0][0] else " with the other weights"
                    what = f"{margin}[{group}]" if margin == "lengths" else f"{margin}.{group}"
                    raise ConfigError(
                        f"{name}.{what}: there are no rows of it{among}; set its weight to 0, or prepare text of it"
                    )
            factors = {group: share / sums[group] if share > 0 else 0.0 for group, share in wanted.items()}
            weights = [w * factors.get(of, 0.0) for w, of in zip(weights, groups, strict=True)]
        if max((abs(new - old) for new, old in zip(weights, before, strict=True)), default=0.0) < 1e-12:
            break
    total = math.fsum(weights)
    if not total:
        raise ConfigError(f"{name}: the split has no rows")
    weights = [weight / total for weight in weights]
    for group, share in (lengths or {}).items():
        actual = math.fsum(w for w, stratum in zip(weights, strata, strict=True) if stratum.length_class == group)
        if abs(actual - share) > TOLERANCE:
            raise ConfigError(
                f"{name}.lengths[{group}]: a share of {share:.1%} is impossible with these weights of the domains, "
                f"whose texts have other lengths; the nearest share is {actual:.1%}. Change lengths or domains"
            )
    return weights


@njit(cache=True)
def interleave(slots: Array, key: int) -> tuple[Array, Array]:
    """A pattern of M = slots.sum() positions in which stratum s has slots[s] positions, spread evenly.

    slots: int64 [strata]. Returns (stratum int32 [M], its number of earlier positions int64 [M]).
    Position n of a stratum with c slots must be in the window [floor(n M / c), ceil((n + 1) M / c)): the proportionate
    fair schedules of Baruah et al. 1996. The window with the earliest end is served first, which satisfies all windows
    on one processor (Jackson 1955, Horn 1974). So after t positions, a stratum has more than c t / M - 1 and fewer than
    c t / M + 1 of them. `key` decides among windows with the same end, so that equal strata do not keep one order.
    """
    positions = slots.sum()
    stratum = np.empty(positions, np.int32)
    occurrence = np.empty(positions, np.int64)
    done = np.zeros(len(slots), np.int64)
    for position in range(positions):
        chosen, first_end, lowest = -1, 0, np.uint64(0)
        for s in range(len(slots)):
            if done[s] < slots[s] and done[s] * positions // slots[s] <= position:
                end = -(-(done[s] + 1) * positions // slots[s])
                random = (np.uint64(position * len(slots) + s) ^ np.uint64(key)) * np.uint64(0x9E3779B97F4A7C15)
                random = (random ^ (random >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                random ^= random >> np.uint64(27)
                if chosen < 0 or end < first_end or (end == first_end and random < lowest):
                    chosen, first_end, lowest = s, end, random
        stratum[position], occurrence[position] = chosen, done[chosen]
        done[chosen] += 1
    return stratum, occurrence


def period_slots(weights: Sequence[float]) -> list[int]:
    """The slots of the period for shares with the sum 1: largest remainders, at least 1 for a share above 0."""
    slots = [max(int(weight * PERIOD), 1 if weight > 0 else 0) for weight in weights]
    while (missing := PERIOD - sum(slots)) != 0:
        step = 1 if missing > 0 else -1
        # the stratum whose slots are furthest below (above) its share; the first of equal ones
        order = sorted(
            (number for number in range(len(slots)) if weights[number] > 0 and (step > 0 or slots[number] > 1)),
            key=lambda number: step * (slots[number] - weights[number] * PERIOD),
        )
        for number in order[: abs(missing)]:
            slots[number] += step
    return slots


def _shares(weights: Mapping[Any, float]) -> dict[Any, float]:
    total = math.fsum(weights.values())
    assert total > 0, "conflicts/data.py refuses weights that are all 0"
    return {name: weight / total for name, weight in weights.items()}


def _pattern_key(seed: int, stage: int) -> int:
    """A key below 2^63 for the pattern of a stage."""
    return int.from_bytes(hashlib.blake2b(repr((seed, stage)).encode(), digest_size=8).digest(), "big") >> 1


def _stages(
    stages: Sequence[schema.CurriculumStage], strata: Sequence[Stratum], total_rows: int, name: str = "data.curriculum"
) -> list[Stage]:
    compiled = []
    start = 0
    for at, stage in enumerate(stages):
        stop = round(stage.until * total_rows)
        slots = period_slots(stratum_weights(stage, strata, f"{name}[{at}]"))
        compiled.append(Stage(start, stop - start, slots))
        start = stop
    return compiled


def _rows_of(stages: Sequence[Stage], stratum: int) -> int:
    """The number of rows of a stratum in the training, rounded up in every stage."""
    return sum(-(-stage.rows * stage.slots[stratum] // PERIOD) for stage in stages)


def _excess(
    stages: Sequence[schema.CurriculumStage], strata: Sequence[Stratum], total_rows: int, limits: Mapping[str, float]
) -> Iterator[tuple[float, int, Stratum]]:
    """(ratio to the limit, number of rows, stratum) of every stratum above its limit."""
    in_rows = _stages(stages, strata, total_rows)
    for number, stratum in enumerate(strata):
        limit = limits.get(stratum.domain)
        wanted = _rows_of(in_rows, number)
        if limit is not None and wanted > limit * stratum.rows:
            yield wanted / (limit * stratum.rows), wanted, stratum


def _check_limits(
    stages: Sequence[schema.CurriculumStage],
    strata: Sequence[Stratum],
    total_rows: int,
    limits: Mapping[str, float],
    key: str,
) -> None:
    worst = max(_excess(stages, strata, total_rows, limits), key=lambda found: found[0], default=None)
    if worst is None:
        return
    _, wanted, stratum = worst
    name, limit = stratum.domain, limits[stratum.domain]
    of_class = f" (class of length {stratum.length_class})" if any(other.length_class for other in strata) else ""
    fitting = _fitting(stages, strata, total_rows, {name: limit}, name)
    remedy = (
        f"the largest weights that fit: {', '.join(f'{weight:.3g} in stage {at + 1}' for at, weight in fitting)}"
        if fitting
        else f"give it a lower weight in {key}, or train for fewer rows"
    )
    raise ConfigError(
        f"data.domains.{name}.max_epochs={limit:g}: the training takes {wanted:,} rows of {name}{of_class}, which has "
        f"{stratum.rows:,}, so each {wanted / stratum.rows:.2f} times; {remedy}; or raise the limit"
    )


def _fitting(
    stages: Sequence[schema.CurriculumStage],
    strata: Sequence[Stratum],
    total_rows: int,
    limits: Mapping[str, float],
    name: str,
) -> list[tuple[int, float]]:
    """(stage, weight) of the largest weights of a domain that its limit allows, in the configured proportions.

    Rounded down to three digits. Empty if no factor above 0 is small enough.
    """

    def scaled(factor: float) -> list[schema.CurriculumStage]:
        changed = []
        for stage in stages:
            weights = dict(stage.domains or {})
            if weights.get(name):
                exponent = math.floor(math.log10(weights[name] * factor)) - 2
                weights[name] = math.floor(weights[name] * factor / 10.0**exponent) * 10.0**exponent
            changed.append(stage.model_copy(update={"domains": weights or None}))
        return changed

    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        try:
            fits = next(_excess(scaled(middle), strata, total_rows, limits), None) is None
        except ConfigError:  # these weights are impossible with the weights of the lengths
            fits = False
        low, high = (middle, high) if fits else (low, middle)
    if not low:
        return []
    weights = [(stage.domains or {}).get(name, 0.0) for stage in scaled(low)]
    return [(at, weight) for at, weight in enumerate(weights) if weight]
