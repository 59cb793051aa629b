"""What gates have in common: confidence bounds, Holm's correction, gates that raise, lenient judgements."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.ladder import bounds, gates_results
from cdrmix.ladder.collect import _measured
from cdrmix.ladder.facts import Facts
from cdrmix.ladder.gates import exactly
from cdrmix.ladder.judgement import decide
from cdrmix.ladder.ledger import Entry
from cdrmix.ladder.presets import Check, preset
from cdrmix.ladder.state import rung_states
from cdrmix.ladder.verdict import Outcome, Verdict
from cdrmix.run_folder import environment

EMPTY = Facts({}, {})


def measure(name: str, value: float | None, count: int, **others: Any) -> dict[str, Any]:
    return {"name": name, "value": value, "low": None, "high": None, "count": count, "problem": None, **others}


def test_bounds_are_those_of_scipy() -> None:
    from scipy import stats  # in constraints.txt: lm-eval needs it

    rng = np.random.default_rng(1)
    for right, count in ((0, 20), (7, 20), (138, 160), (20, 20)):
        expected = stats.binomtest(right, count).proportion_ci(0.90, method="wilson")  # one-sided 95 % on each side
        assert bounds.wilson(right / count, count)[1:] == pytest.approx((expected.low, expected.high), abs=1e-12)
    for values in (rng.normal(size=5), rng.normal(size=31), rng.normal(size=200)):
        found = bounds.median_bounds(values.tolist())
        expected = stats.quantile_test(values, p=0.5).confidence_interval(0.90)
        # scipy's two-sided interval has 90 %, so each side 95 %.
        assert found[1:] == (expected.low, expected.high)
        p_value = stats.binomtest(int((values > 0.1).sum()), len(values), alternative="greater").pvalue
        assert bounds.median_p_value(values.tolist(), 0.1) == pytest.approx(p_value)
    for n, m in ((3, 5), (8, 8), (30, 40)):
        later, earlier = rng.normal(size=n), rng.normal(size=m)
        method = "exact" if n + m <= bounds.EXACT_VALUES else "asymptotic"
        p_value = stats.mannwhitneyu(later, earlier, alternative="greater", method=method).pvalue
        assert bounds.shift_p_value(later.tolist(), earlier.tolist(), 0.0) == pytest.approx(p_value)
        # The bounds are the shifts that the test does not reject.
        found = bounds.shift_bounds(later.tolist(), earlier.tolist())
        if math.isfinite(found.low):
            assert bounds.shift_p_value(later.tolist(), earlier.tolist(), found.low - 1e-9) <= bounds.ERROR
            assert bounds.shift_p_value(later.tolist(), earlier.tolist(), found.low + 1e-9) > bounds.ERROR


def test_the_items_that_decide() -> None:
    """Wilson: 138 items show .85 when .90 is seen."""
    found = [bounds.items_for_share(share, limit) for share, limit in ((0.9, 0.85), (0.97, 0.95), (0.55, 0.5))]
    assert found == [138, 322, 271]
    held = [
        gates_results.of_share(gates_results.Share(bounds.wilson(0.9, n), n), 0.85, "x", at_least=True)
        for n in (137, 138)
    ]
    assert [verdict.outcome for verdict in held] == [Outcome.HOLD, Outcome.PASS]
    assert "138 items would decide it" in held[0].reason


def test_holm() -> None:
    """The example of Holm 1979: of .01, .02, .03, .005 at 5 %, m = 4, the two smallest are rejected."""
    assert bounds.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == {"d", "a"}
    assert bounds.holm({}) == frozenset()


def raising(facts: Facts) -> Verdict:
    raise KeyError("solubility")


def speechless(facts: Facts) -> Verdict:
    return True  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("gate", "reason"), [(raising, "KeyError: 'solubility'"), (speechless, "the gate returned True")]
)
def test_a_gate_that_raises_fails(gate: Callable[[Facts], Verdict], reason: str) -> None:
    judgement = decide("quick", [*preset("quick"), Check("chemistry", "custom", gate, (), "")], EMPTY)
    assert judgement.verdicts["chemistry"].outcome is Outcome.FAIL
    assert reason in judgement.verdicts["chemistry"].reason
    assert judgement.exit_code == 14


def test_lenient_passes_and_keeps_the_reason() -> None:
    judgement = decide("quick", preset("quick"), EMPTY, "a test of the pipeline")
    assert judgement.passed
    assert judgement.exit_code == 0
    assert judgement.outcome is Outcome.NOT_MEASURED
    assert judgement.stopping == ("finite", "loss")


def test_repeats_do_not_narrow_the_interval() -> None:
    """Never again until green: the mean of both counts, with the items of one."""
    once = gates_results.pooled([measure("x", 0.4, 100)])
    again = gates_results.pooled([measure("x", 0.4, 100), measure("x", 0.8, 100)])
    assert once is not None
    assert again is not None
    assert again.found.value == pytest.approx(0.6)
    assert again.n == 100
    assert again.found.high - again.found.low > 0.9 * (once.found.high - once.found.low)
    with pytest.raises(ValueError, match="is 40, which is no share"):
        gates_results.pooled([measure("x", 40.0, 100)])


def test_steps_trained_again_count_for_their_configuration_and_machine(tmp_path: Path) -> None:
    config = Config.from_yaml(Path(__file__).parents[2] / "configs" / "base" / "tiny.yaml")
    run: Any = SimpleNamespace(path=tmp_path)
    (tmp_path / "gates").mkdir()
    here = {"config_hash": config.hash(), "environment": environment()}
    for changed in ({}, {"config_hash": "0"}, {"environment": {**environment(), "machine": "another"}}):
        stored = {"determinism": {"steps": 20, "differences": []}, **here, **changed}
        (tmp_path / "gates" / "measured.json").write_text(json.dumps(stored))
        assert _measured(run, config, False, print) == ({} if changed else stored)


def test_a_rung_has_the_entries_of_its_configuration() -> None:
    """After a change of the configuration nothing of the earlier attempt counts, but the attempt is counted."""
    kinds: tuple[Any, ...] = ("forecast", "trained", "judged")
    entries = [
        Entry(number, kind, "a", {"identity": identity, "seed": 1, "loss": loss}, {})
        for number, (identity, loss, kind) in enumerate(
            [*(("old", 3.0, kind) for kind in kinds), *(("new", 2.0, kind) for kind in kinds[:2])], 1
        )
    ]
    plan = {"name": "a", "identity": "new", "seeds": [1], "compute": 1.0, "parameters": 1, "tokens": 1}
    for count, losses in ((3, ()), (5, (2.0,))):
        ledger: Any = SimpleNamespace(entries=entries[:count])
        (state,) = rung_states(ledger, [plan])
        assert (state.losses, state.judged, state.earlier) == (losses, None, 1)
        assert (state.measured is None) is (not losses)


def test_an_unknown_preset() -> None:
    with pytest.raises(ConfigError, match="did you mean 'standard'"):
        preset("standart")
    assert exactly(True, "", n=1).outcome is Outcome.PASS


def shares_at_the_threshold(rng: np.random.Generator, count: int) -> Facts:
    """Twelve shares whose true values are the threshold, of 400 items."""
    measures = [measure(f"x{i}", rng.binomial(400, 0.5) / 400, 400) for i in range(count)]
    return Facts({}, {}, results=({"suite": "x", "measures": measures, "facts": {}, "notes": []},))


def test_holm_bounds_the_runs_that_fail_by_chance() -> None:
    """Of twelve gates at 5 % one fails by chance in 46 % of the runs, 1 - .95^12; with Holm in at most 5 %.

    Of 400 runs at most 9 % are allowed: four standard errors above 5 %.
    """
    checks = [
        Check(f"x{i}", "", gates_results.suite_share("x", f"x{i}", 0.5, "", at_least=True), ("results",), "")
        for i in range(12)
    ]
    rng = np.random.default_rng(2)
    failed, without = 0, 0
    for _ in range(400):
        facts = shares_at_the_threshold(rng, 12)
        without += any(check.gate(facts).outcome is Outcome.FAIL for check in checks)
        judgement = decide("x", checks, facts)
        failed += judgement.outcome is Outcome.FAIL
    assert failed / 400 < 0.09
    assert 0.36 < without / 400 < 0.56  # four standard errors around 46 %
