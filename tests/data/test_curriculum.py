"""The curriculum: proportions in every window, every row of a stratum once an epoch, limits that are kept."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cdrmix.config.batch_sizes import BatchWarmup
from cdrmix.config.schema_data import CurriculumStage
from cdrmix.data.curriculum import PERIOD, Mixture, interleave, make_mixture, period_slots, stratum_weights
from cdrmix.data.loader import TrainLoader
from cdrmix.data.shards import Split, Stratum
from cdrmix.errors import ConfigError


def strata_of(*rows: tuple[str, int, int]) -> list[Stratum]:
    """(domain, class of length, rows) each, one behind the other."""
    firsts = itertools.accumulate((count for _, _, count in rows), initial=0)
    return [
        Stratum(domain, length, first, count, 0, 0)
        for (domain, length, count), first in zip(rows, firsts, strict=False)
    ]


DOMAINS = strata_of(("web", 0, 5000), ("code", 0, 3001), ("books", 0, 17))
STAGES = [
    CurriculumStage(until=0.5, domains={"web": 0.7, "code": 0.3}),
    CurriculumStage(until=0.8, domains={"web": 6, "code": 3, "books": 1}),
    CurriculumStage(until=1.0),
]


def mixture(
    stages: list[CurriculumStage] = STAGES,
    strata: list[Stratum] = DOMAINS,
    *,
    total_rows: int = 20_000,
    seed: int = 1,
    limits: dict[str, float] | None = None,
) -> Mixture:
    return Mixture(stages, strata, total_rows=total_rows, seed=seed, limits=limits)


def stratum_of_rows(rows: np.ndarray, strata: list[Stratum]) -> np.ndarray:
    return np.searchsorted([stratum.first_row for stratum in strata], rows, "right") - 1


def shares_wanted(position: int, total_rows: int) -> list[float]:
    if position < 0.5 * total_rows:
        return [0.7, 0.3, 0]
    if position < 0.8 * total_rows:
        return [0.6, 0.3, 0.1]
    whole = 5000 + 3001 + 17
    return [5000 / whole, 3001 / whole, 17 / whole]


def test_every_window_of_1000_rows_has_its_proportions() -> None:
    """A stage's prefix has less than one row too many or too few, so a window within a stage less than 2, and one
    over a border less than 4: 0.4 % of 1,000. PERIOD's rounding adds 1,000 / 65,536."""
    total = 20_000
    found = stratum_of_rows(mixture(total_rows=total).rows(np.arange(total)), DOMAINS)
    wanted = np.array([shares_wanted(position, total) for position in range(total)])
    for number in range(3):
        off = np.concatenate([[0], np.cumsum((found == number) - wanted[:, number])])
        window = np.abs(off[1000:] - off[:-1000])
        assert window.max() < 4 + 1000 / PERIOD
        assert window.max() < 0.02 * 1000


def test_small_strata_are_spread_too() -> None:
    """48 strata from 40 % down to a thousandth, in a stage longer than the period."""
    shares = [0.4, 0.2, *np.geomspace(0.05, 0.001, 46)]
    shares = [share / sum(shares) for share in shares]
    strata = strata_of(*((f"d{number}", 0, 100) for number in range(48)))
    stages = [CurriculumStage(until=1.0, domains={f"d{n}": share for n, share in enumerate(shares)})]
    total = 2 * PERIOD + 777
    found = stratum_of_rows(mixture(stages, strata, total_rows=total).rows(np.arange(total)), strata)
    for number, share in enumerate(shares):
        off = np.concatenate([[0], np.cumsum((found == number) - share)])
        # the error of a prefix is less than one; rounding shares to the period adds at most 1 / PERIOD
        assert np.abs(off).max() < 1 + total / PERIOD
        assert np.abs(off[1000:] - off[:-1000]).max() < 2 + 1000 / PERIOD


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=7).filter(any), st.integers(0, 2**63 - 1))
def test_the_pattern_is_fair_at_every_place(slots: list[int], key: int) -> None:
    places = sum(slots)
    strata, occurrences = interleave(np.array(slots, np.int64), key)
    seen = [0] * len(slots)
    for index, (stratum, occurrence) in enumerate(zip(strata.tolist(), occurrences.tolist(), strict=True)):
        assert occurrence == seen[stratum]
        seen[stratum] += 1
        for number, count in enumerate(slots):
            assert abs(seen[number] * places - count * (index + 1)) < places
    assert seen == slots


def test_equal_strata_do_not_alternate() -> None:
    strata, _ = interleave(np.array([500, 500]), 3)
    firsts = Counter(strata[::2].tolist())
    assert abs(firsts[0] - 250) < 56  # binomial of 500 at 1/2: five standard deviations


@settings(deadline=None)
@example([1.0, 1e-69, 1e-69, 1e-69])
@given(st.lists(st.floats(0, 1), min_size=1, max_size=60).filter(lambda weights: sum(weights) > 1e-3))
def test_slots_of_the_period(weights: list[float]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    slots = period_slots(shares)
    assert sum(slots) == PERIOD
    # remainders are below 1; what strata below one slot are given is taken from the others, one each in turn
    given_to = sum(0 < share * PERIOD < 1 for share in shares)
    taken_from = sum(share * PERIOD >= 100 for share in shares)  # of 60 at most: that many are left with more than one
    for share, count in zip(shares, slots, strict=True):
        assert (count > 0) == (share > 0)
        assert abs(count - share * PERIOD) <= 1 + math.ceil(given_to / taken_from)


def test_rows_are_a_function_of_the_position() -> None:
    whole = mixture().rows(np.arange(30_000))  # beyond the training too
    assert ((whole >= 0) & (whole < 5000 + 3001 + 17)).all()
    positions = np.array([29_999, 0, 12_345, 0, 19_999, 10_000])
    np.testing.assert_array_equal(mixture().rows(positions), whole[positions])
    assert (mixture(seed=2).rows(np.arange(1000)) != whole[:1000]).mean() > 0.9
    with pytest.raises(IndexError, match="position -1 is negative"):
        mixture().rows(np.array([-1]))


def test_every_row_of_a_stratum_once_an_epoch() -> None:
    """Over all stages: after n of a stratum's turns, no row was taken more than once more often than another."""
    rows = mixture().rows(np.arange(20_000))
    for number, stratum in enumerate(DOMAINS):
        mine = rows[stratum_of_rows(rows, DOMAINS) == number] - stratum.first_row
        assert len(mine) > stratum.rows
        epochs = [mine[start : start + stratum.rows] for start in range(0, len(mine), stratum.rows)]
        for epoch in epochs:
            assert len(set(epoch.tolist())) == len(epoch)
        assert epochs[0].tolist() != epochs[1][: len(epochs[0])].tolist()


LENGTHS = strata_of(
    ("web", 0, 600), ("web", 1, 300), ("web", 2, 100), ("code", 0, 50), ("code", 1, 0), ("code", 2, 150)
)


def margins(weights: list[float], strata: list[Stratum]) -> tuple[dict[str, float], dict[int, float]]:
    domains: Counter[str] = Counter()
    lengths: Counter[int] = Counter()
    for weight, stratum in zip(weights, strata, strict=True):
        domains[stratum.domain] += weight
        lengths[stratum.length_class] += weight
    return dict(domains), dict(lengths)


def test_weights_follow_the_rows_where_none_are_said() -> None:
    rows = [stratum.rows for stratum in LENGTHS]
    assert stratum_weights(CurriculumStage(until=1), LENGTHS) == pytest.approx([count / 1200 for count in rows])
    by_domain = stratum_weights(CurriculumStage(until=1, domains={"web": 1, "code": 3}), LENGTHS)
    assert by_domain == pytest.approx([0.25 * 0.6, 0.25 * 0.3, 0.25 * 0.1, 0.75 * 0.25, 0, 0.75 * 0.75])
    by_length = stratum_weights(CurriculumStage(until=1, lengths=[0, 1, 1]), LENGTHS)
    assert by_length == pytest.approx([0, 0.5, 0.5 * 0.4, 0, 0, 0.5 * 0.6])


def test_both_margins_are_met() -> None:
    stage = CurriculumStage(until=1, domains={"web": 0.5, "code": 0.5}, lengths=[0.4, 0.2, 0.4])
    weights = stratum_weights(stage, LENGTHS)
    domains, lengths = margins(weights, LENGTHS)
    assert domains == pytest.approx({"web": 0.5, "code": 0.5})
    assert lengths == pytest.approx({0: 0.4, 1: 0.2, 2: 0.4}, abs=1e-9)
    assert weights[4] == 0
    # the fit keeps how lengths and domains go together: this ratio of ratios is that of the rows
    assert weights[0] * weights[5] / (weights[2] * weights[3]) == pytest.approx(600 * 150 / (100 * 50))


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (
            CurriculumStage(until=1, domains={"web": 1, "maths": 1}),
            r"data\.curriculum\[0\]\.domains\.maths: there are no",
        ),
        (
            CurriculumStage(until=1, lengths=[1, 1, 1, 1]),
            r"data\.curriculum\[0\]\.lengths\[3\]: there are no rows of it;",
        ),
        (
            CurriculumStage(until=1, domains={"code": 1}, lengths=[1, 1, 0]),
            r"lengths\[1\]: there are no rows of it with the other weights",
        ),
        (
            CurriculumStage(until=1, domains={"web": 1, "code": 1}, lengths=[0, 0.9, 0.1]),
            r"lengths\[1\]: a share of 90\.0% is impossible .* the nearest share is 50\.0%",
        ),
    ],
)
def test_weights_that_cannot_be_had(stage: CurriculumStage, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        mixture([stage], LENGTHS)


def test_a_limit_names_what_would_fit_and_that_fits() -> None:
    stages = [
        CurriculumStage(until=0.5, domains={"web": 0.9, "books": 0.1}),
        CurriculumStage(until=1, domains={"web": 0.8, "books": 0.2}),
    ]
    with pytest.raises(ConfigError) as caught:
        mixture(stages, limits={"books": 4})
    said = str(caught.value)
    # 10,000 rows at 0.1 and 10,000 at 0.2, rounded up
    assert re.search(
        r"data\.domains\.books\.max_epochs=4: the training takes 3,00[0-2] rows of books, which has 17,", said
    )
    weights = [float(number) for number in re.findall(r"([0-9.e-]+) in stage", said)]
    assert len(weights) == 2

    def at(factor: float) -> list[CurriculumStage]:
        return [
            CurriculumStage(until=stage.until, domains={**(stage.domains or {}), "books": weight * factor})
            for stage, weight in zip(stages, weights, strict=True)
        ]

    rows = mixture(at(1), limits={"books": 4}).rows(np.arange(20_000))
    taken = Counter(row for row in rows.tolist() if row >= 8001)
    assert max(taken.values()) <= 4
    with pytest.raises(ConfigError, match="max_epochs=4"):
        mixture(at(1.1), limits={"books": 4})
    assert mixture(stages, limits={"books": 3002 / 17 + 0.01, "web": 100})


def test_what_a_person_reads() -> None:
    lines = mixture().lines()
    assert lines[0] == "stage 1 of 3, 10,000 rows from 0 on: web 70.0%, code 30.0%, books 0.0%"
    assert lines[1] == "stage 2 of 3, 6,000 rows from 10,000 on: web 60.0%, code 30.0%, books 10.0%"
    assert re.fullmatch(r"epochs over the training: web 2\.62, code 2\.10, books 35\.\d\d", lines[3])


def configured(make_config: Any, steps: int, **data: Any) -> Any:
    """A configuration of web and books, of `steps` steps of ten rows."""
    source = {"kind": "stdlib"}
    domains = {"web": {"source": source}, "books": {"source": source, "max_epochs": 2}}
    config = make_config(None, domains=domains, **data)
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps, "batch_rows": 10})})


def test_the_mixture_of_a_configuration(make_config: Any) -> None:
    strata = strata_of(("web", 0, 90), ("books", 0, 10))
    split: Split = SimpleNamespace(strata=strata, rows=100, row_length=16)  # type: ignore[assignment]
    assert make_mixture(configured(make_config, 20), split) is None
    with pytest.raises(ConfigError, match=r"books\.max_epochs=2: .* takes 210 rows of the 100 .* train\.steps to 20,"):
        make_mixture(configured(make_config, 21), split)
    # A batch warm-up of 5 rows in each of 8 steps leaves rows for 4 steps more.
    warm = configured(make_config, 24)
    warmup = {"batch_warmup": BatchWarmup(rows=5, steps=8)}
    fitting, longer = (
        warm.model_copy(update={"train": warm.train.model_copy(update=warmup | {"steps": steps})}) for steps in (22, 25)
    )
    rows = fitting.train.batch_sizes.before(22)
    assert rows == 180
    assert make_mixture(fitting, split) is None
    with pytest.raises(ConfigError, match=r"books\.max_epochs=2: .* takes 210 rows of the 100 .* train\.steps to 24,"):
        make_mixture(longer, split)
    stages = [{"until": 0.5, "domains": {"web": 1}}, {"until": 1.0, "domains": {"web": 1, "books": 1}}]
    with pytest.raises(ConfigError, match=r"books\.max_epochs=2: the training takes 25 rows of books, which has 10"):
        make_mixture(configured(make_config, 10, curriculum=stages), split)
    order = make_mixture(configured(make_config, 8, curriculum=stages), split)
    assert order is not None
    loader = TrainLoader(split, row_length=16, batch_rows=10, micro_batch_rows=5, seed=1, mixture=order)
    rows = np.concatenate([loader.rows(step) for step in range(8)])
    np.testing.assert_array_equal(rows, order.rows(np.arange(80)))
    assert (rows[:40] < 90).all()
    assert (rows[40:] >= 90).sum() == 20
    assert Counter(rows[rows >= 90].tolist()) == dict.fromkeys(range(90, 100), 2)
