"""The curriculum: which row of the shards the training takes at a position, as a function of the position alone.

A stage gives every stratum (a domain and a class of length) a weight. Its positions are dealt to the strata by a
pattern of PERIOD slots, repeated: each stratum has its share of the slots, spread so that of any first n positions
of the stage it has less than one row too many or too few. So the proportions hold in every window, not on average.
Occurrence n of a stratum, counted over the whole training, is row n of the stratum's own order: epoch by epoch, each
a keyed permutation. Nothing is remembered between positions.
"""

from __future__ import annotations

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
FITTING_ROUNDS = 200  # of the weights to two margins; what these do not reach is refused
TOLERANCE = 0.005  # by which a length's share may miss its weight where the domains have other lengths

Array = np.ndarray[Any, np.dtype[Any]]


class Stage(NamedTuple):
    """A stage in rows: from position `start`, `slots` of the period for each stratum, `rows` of the training."""

    start: int
    rows: int
    slots: list[int]


class Mixture:
    """Rows by position, for a training of `total_rows` rows; positions beyond it go on as its last stage.

    stages: at least one. strata: of the split. limits: of domains that have one, how often training may go through
    each of their rows. name: the curriculum's key, for messages.

    Raises ConfigError for a domain or a class of length that has a weight but no rows, and for one that the
    training would go through more often than its limit allows.
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
            interleave(np.array(stage.slots, np.int64), _number(seed, at)) for at, stage in enumerate(self.stages)
        ]
        self._strata = np.stack([pattern[0] for pattern in patterns])  # [stages, PERIOD]
        self._occurrences = np.stack([pattern[1] for pattern in patterns])
        self._slots = np.array([stage.slots for stage in self.stages], np.int64)  # [stages, strata]
        taken = [self._taken_in(at, stage.rows) for at, stage in enumerate(self.stages)]
        self._taken_before = np.cumsum([np.zeros_like(taken[0]), *taken], axis=0)[:-1]  # [stages, strata]
        self._rows = np.array([stratum.rows for stratum in strata], np.int64)
        self._first_rows = np.array([stratum.first_row for stratum in strata], np.int64)

    def stratum_of(self, positions: Array) -> tuple[Array, Array]:
        """(stratum, occurrence), int64 [n] each: whose row a position takes, and the how-manieth of it, from 0."""
        positions = np.asarray(positions, np.int64)
        if len(positions) and positions.min() < 0:
            raise IndexError(f"position {positions.min()} is negative")
        stages = np.searchsorted(self._starts, positions, "right") - 1
        periods, slots = np.divmod(positions - self._starts[stages], PERIOD)
        strata = self._strata[stages, slots].astype(np.int64)
        before = self._taken_before[stages, strata] + periods * self._slots[stages, strata]
        return strata, before + self._occurrences[stages, slots]

    def rows(self, positions: Array) -> Array:
        """int64 [n]: the row of the split that the training takes at each of `positions`, int64 [n]."""
        strata, occurrences = self.stratum_of(positions)
        epochs, places = np.divmod(occurrences, self._rows[strata])
        orders, which = np.unique(np.stack([strata, epochs]), axis=1, return_inverse=True)
        keys = [(self.seed, epoch, stratum) for stratum, epoch in orders.T.tolist()]
        sizes = self._rows[orders[0]].tolist()
        return self._first_rows[strata] + permute_each(places, which.reshape(-1), sizes, keys)

    def lines(self) -> list[str]:
        """What a person reads of it: of every stage the share of each domain, and how often it is gone through."""
        said = []
        for at, stage in enumerate(self.stages):
            shares = ", ".join(f"{name} {share:.1%}" for name, share in self._by_domain(stage.slots).items())
            said.append(f"stage {at + 1} of {len(self.stages)}, {stage.rows:,} rows from {stage.start:,} on: {shares}")
        rows = [_rows_of(self.stages, number) for number in range(len(self.strata))]
        taken = self._by_domain(rows, 1)
        there = self._by_domain([stratum.rows for stratum in self.strata], 1)
        epochs = ", ".join(f"{name} {taken[name] / there[name]:.2f}" for name in taken if there[name])
        return [*said, f"epochs over the training: {epochs}"]

    def _by_domain(self, values: Sequence[float], whole: float = PERIOD) -> dict[str, float]:
        sums = dict.fromkeys((stratum.domain for stratum in self.strata), 0.0)
        for stratum, value in zip(self.strata, values, strict=True):
            sums[stratum.domain] += value / whole
        return sums

    def _taken_in(self, stage: int, rows: int) -> Array:
        """int64 [strata]: how many of the first `rows` rows of a stage each stratum has."""
        periods, slots = divmod(rows, PERIOD)
        rest = np.bincount(self._strata[stage, :slots], minlength=len(self.strata))
        return periods * self._slots[stage] + rest


def make_mixture(config: Config, split: Split) -> Mixture | None:
    """The mixture of a configured training; None without a curriculum: then all rows are alike.

    Raises ConfigError as Mixture does, without a curriculum too.
    """
    total_rows = config.train.steps * config.train.batch_rows
    limits = {
        name: domain.max_epochs for name, domain in config.data.all_domains().items() if domain.max_epochs is not None
    }
    key, stages = config.data.stages()
    if stages:
        seed = config.run.seed
        return Mixture(stages, split.strata, total_rows=total_rows, seed=seed, limits=limits, name=key)
    for name, limit in limits.items():
        if total_rows > limit * split.rows:
            raise ConfigError(
                f"data.domains.{name}.max_epochs={limit:g}: the training takes {total_rows:,} rows of the "
                f"{split.rows:,} there are, {total_rows / split.rows:.2f} times each; lower train.steps to "
                f"{int(limit * split.rows) // config.train.batch_rows}, give the domain less weight by "
                "data.curriculum, or raise the limit"
            )
    return None


def stratum_weights(
    stage: schema.CurriculumStage, strata: Sequence[Stratum], name: str = "data.curriculum"
) -> list[float]:
    """The shares of the strata in a stage, 1 in sum: their rows, fitted to the weights of domains and of lengths.

    Iterative proportional fitting (Deming and Stephan 1940): of all tables with the margins asked for the one
    nearest to the rows there are. name: of the stage, for messages.

    Raises ConfigError when a weight has no rows, or when both margins cannot be had together.
    """
    domains = None if stage.domains is None else _shares(stage.domains)
    lengths = None if stage.lengths is None else _shares(dict(enumerate(stage.lengths)))
    weights = [float(stratum.rows) for stratum in strata]
    margins: list[tuple[str, Mapping[Any, float], list[Any]]] = []
    if lengths is not None:
        margins.append(("lengths", lengths, [stratum.length_class for stratum in strata]))
    if domains is not None:  # last, so that the domains' shares are met in any case
        margins.append(("domains", domains, [stratum.domain for stratum in strata]))
    for round_ in range(FITTING_ROUNDS if len(margins) > 1 else 1):
        before = weights
        for margin, wanted, groups in margins:
            sums = {
                group: math.fsum(w for w, of in zip(weights, groups, strict=True) if of == group) for group in wanted
            }
            for group, share in wanted.items():
                if share > 0 and not sums[group]:
                    among = "" if round_ == 0 and margin == margins[0][0] else ", of those that other weights leave"
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
        found = math.fsum(w for w, stratum in zip(weights, strata, strict=True) if stratum.length_class == group)
        if abs(found - share) > TOLERANCE:
            raise ConfigError(
                f"{name}.lengths[{group}]: {share:.1%} of this length cannot be had with these weights of domains, "
                f"whose texts are of other lengths; the nearest is {found:.1%}. Change the stage's lengths or domains"
            )
    return weights


@njit(cache=True)
def interleave(slots: Array, key: int) -> tuple[Array, Array]:
    """A pattern of slots.sum() places in which stratum s has slots[s], spread evenly.

    slots: int64 [strata]. Returns (stratum int32 [places], how many places of it came before int64 [places]).
    Place n of c among M belongs to stratum s in [floor(n M / c), ceil((n + 1) M / c)): a window of Baruah et al.
    1996's fair schedules. Whichever window ends first is served, which on one processor meets all of them (Jackson
    1955, Horn 1974), so that after any t places a stratum has more than c t / M - 1 and fewer than c t / M + 1. Among
    windows that end together `key` draws, so that equal strata do not keep one order.
    """
    places = slots.sum()
    stratum = np.empty(places, np.int32)
    occurrence = np.empty(places, np.int64)
    done = np.zeros(len(slots), np.int64)
    for place in range(places):
        chosen, first_end, lowest = -1, 0, np.uint64(0)
        for s in range(len(slots)):
            if done[s] < slots[s] and done[s] * places // slots[s] <= place:
                end = -(-(done[s] + 1) * places // slots[s])
                drawn = (np.uint64(place * len(slots) + s) ^ np.uint64(key)) * np.uint64(0x9E3779B97F4A7C15)
                drawn = (drawn ^ (drawn >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                drawn ^= drawn >> np.uint64(27)
                if chosen < 0 or end < first_end or (end == first_end and drawn < lowest):
                    chosen, first_end, lowest = s, end, drawn
        stratum[place], occurrence[place] = chosen, done[chosen]
        done[chosen] += 1
    return stratum, occurrence


def period_slots(weights: Sequence[float]) -> list[int]:
    """Slots of the period for shares that are 1 in sum: largest remainders, and at least one for any share above 0."""
    slots = [max(int(weight * PERIOD), 1 if weight > 0 else 0) for weight in weights]
    while (missing := PERIOD - sum(slots)) != 0:
        step = 1 if missing > 0 else -1
        # whose slots are furthest below (above) its share; of equal ones the first
        order = sorted(
            (number for number in range(len(slots)) if weights[number] > 0 and (step > 0 or slots[number] > 1)),
            key=lambda number: step * (slots[number] - weights[number] * PERIOD),
        )
        for number in order[: abs(missing)]:
            slots[number] += step
    return slots


def _shares(weights: Mapping[Any, float]) -> dict[Any, float]:
    total = math.fsum(weights.values())
    assert total > 0, "validators.py refuses weights that are all 0"
    return {name: weight / total for name, weight in weights.items()}


def _number(seed: int, stage: int) -> int:
    """A key below 2^63 for the pattern of a stage."""
    return int.from_bytes(hashlib.blake2b(repr((seed, stage)).encode(), digest_size=8).digest(), "big") >> 1


def _stages(
    stages: Sequence[schema.CurriculumStage], strata: Sequence[Stratum], total_rows: int, name: str = "data.curriculum"
) -> list[Stage]:
    found = []
    start = 0
    for at, stage in enumerate(stages):
        stop = round(stage.until * total_rows)
        slots = period_slots(stratum_weights(stage, strata, f"{name}[{at}]"))
        found.append(Stage(start, stop - start, slots))
        start = stop
    return found


def _rows_of(stages: Sequence[Stage], stratum: int) -> int:
    """How many rows of a stratum the training takes, rounded up in every stage."""
    return sum(-(-stage.rows * stage.slots[stratum] // PERIOD) for stage in stages)


def _excess(
    stages: Sequence[schema.CurriculumStage], strata: Sequence[Stratum], total_rows: int, limits: Mapping[str, float]
) -> Iterator[tuple[float, int, Stratum]]:
    """(how many times the limit, rows wanted, stratum) of every stratum that is wanted more often than allowed."""
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
    """(stage, weight) of the largest weights of a domain, in the proportions written, that its limit allows.

    To three digits, downwards; empty where no factor above 0 on the written weights is enough.
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
        except ConfigError:  # such weights cannot be had together with the lengths
            fits = False
        low, high = (middle, high) if fits else (low, middle)
    if not low:
        return []
    weights = [(stage.domains or {}).get(name, 0.0) for stage in scaled(low)]
    return [(at, weight) for at, weight in enumerate(weights) if weight]
