"""Gates: bounds, good and doctored facts, what is missing, gates that raise, Holm's correction, simulated good runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cdrmix.ladder.facts import Facts
from cdrmix.ladder.judgement import Judgement, decide
from cdrmix.ladder.presets import PRESETS, preset
from cdrmix.ladder.verdict import Outcome

ROUTERS, EXPERTS = 4, 8
SETS = {"hellaswag": (0.25, 0.42, 10042), "arc_easy": (0.25, 0.52, 2376), "piqa": (0.5, 0.68, 1838)}
# Suite, figure, its true value in a good run, and its items: those of the published sets. The values are about four
# standard errors from the thresholds of PRODUCTION, as those of a model that is good enough.
SHARES = [
    ("reasoning", "gsm8k exact_match", 0.58, 1319),
    ("tools", "simple accuracy", 0.91, 400),
    ("tools", "multiple accuracy", 0.91, 200),
    ("tools", "irrelevance accuracy", 0.91, 240),
    ("code", "compile_rate", 0.85, 200),
    ("code", "humaneval pass@1", 0.57, 164),
    ("code", "humaneval pass@5", 0.77, 164),
    ("code", "humaneval pass@10", 0.86, 164),
    ("leak", "verbatim_train", 0.001, 1000),
]


def measure(name: str, value: float | None, count: int, **others: Any) -> dict[str, Any]:
    return {"name": name, "value": value, "low": None, "high": None, "count": count, "problem": None, **others}


def results(draw: Callable[[float, int], float]) -> list[dict[str, Any]]:
    """Results of all suites; draw: the share that is seen, of the true share and the number of items."""
    choices = [measure(f"{name} accuracy", draw(true, count), count) for name, (_, true, count) in SETS.items()]
    chance = {name: each for name, (each, _, _) in SETS.items()}
    found = [{"suite": "choices", "measures": choices, "facts": {"chance": chance}, "notes": []}]
    for suite in dict.fromkeys(suite for suite, *_ in SHARES):
        shares = [measure(name, draw(true, count), count) for other, name, true, count in SHARES if other == suite]
        found.append({"suite": suite, "measures": shares, "facts": {}, "notes": []})
    latency = [
        measure("request_p50_ms", 2000.0, 500),
        measure("request_p99_ms", 3000.0, 500, high=3300.0),
        measure("peak_memory_mib", 4000.0, 500),
    ]
    return [*found, {"suite": "latency", "measures": latency, "facts": {}, "notes": []}]


def good_facts(rng: np.random.Generator | None = None, rows: int = 300) -> Facts:
    """The facts of a good run of 10 steps a row. rng: the noise of a run; None: none.

    The noise of the loss, 1 %, is that of batches of 2,048 tokens of core-tiny in its last steps; gradient norms are
    log-normal, speeds vary by 3 %.
    """

    def noise(scale: float, size: tuple[int, ...] | int = rows) -> Any:
        return scale * rng.standard_normal(size) if rng is not None else np.zeros(size)

    steps = 10 * np.arange(1, rows + 1)
    end = steps[-1]
    fall = np.clip((steps - 0.8 * end) / (0.2 * end), 0, 1)  # of the loss while the learning rate goes to its end
    losses = (2.3 + 6 * np.exp(-steps / (0.1 * end)) + 0.3 * (1 - steps / end) - 0.1 * fall) * (1 + noise(0.01))
    norms = 0.5 * np.exp(noise(0.2)) + 2 * np.exp(-steps / (0.01 * end))
    speeds = 1e6 * (1 + noise(0.03))
    loads = np.full((rows, ROUTERS, EXPERTS), 1 / EXPERTS) * (1 + 0.1 * np.tanh(noise(1.0, (rows, ROUTERS, EXPERTS))))
    loads /= loads.sum(-1, keepdims=True)
    entropies = -(loads * np.log(loads)).sum(-1) / math.log(EXPERTS)
    overflows = np.clip(loads - 1.25 / EXPERTS, 0, None).sum(-1)
    router_rows = range(rows - 12, rows)
    recorded = tuple(
        {
            "step": int(steps[row]),
            "loss": losses[row] + 0.01,
            "next_token_loss": float(losses[row]),
            "gradient_norm": float(norms[row]),
            "tokens_per_second": float(speeds[row]),
            "memory_gib": 60.0,
            "routers": [str(router) for router in range(ROUTERS)],
            "router": {"entropy_normalised": entropies[row].tolist(), "overflow": overflows[row].tolist()}
            if row in router_rows
            else {},
            "load": loads[row].tolist() if row in router_rows else [],
        }
        for row in range(rows)
    )
    again = {"steps": 20, "differences": [], "problem": None}
    return Facts(
        run={"name": "good", "config_hash": "0", "folder": "good", "step": int(end)},
        settings={
            "vocabulary": 50272,
            "steps": int(end),
            "warmup_steps": int(end) // 50,
            "log_every": 10,
            "preferences": False,
            "routed": True,
        },
        rows=recorded,
        held_out={"loss_nats_per_token": 2.4, "perplexity": math.exp(2.4), "tokens": 10**6},
        weights={"checkpoint": "step-1", "step": 1, "values": 1000, "not_finite": 0, "first": None, "files": {}},
        machine={"name": "H200", "memory_bytes": 140 * 2**30},
        plan={"tokens_per_second": 1e6, "source": "the plan"},
        forecast={"band": True, "low": 2.3, "high": 2.5, "loss": 2.4, "rungs": 3, "notes": []},
        determinism=again,
        resume=again,
        export={"step": 1, "files": {"a": "b"}, "problems": [], "logits": True, "logits_problem": None},
        results=tuple(results(lambda true, count: true if rng is None else rng.binomial(count, true) / count)),
    )


GOOD = good_facts()


def judged(name: str, facts: Facts) -> Judgement:
    return decide(name, preset(name), facts)


@pytest.mark.parametrize("name", PRESETS)
def test_a_good_run_passes(name: str) -> None:
    judgement = judged(name, GOOD)
    assert judgement.passed, {gate: judgement.verdicts[gate].reason for gate in judgement.stopping}
    assert judgement.exit_code == 0
    assert all(len(verdict.inputs_sha256) == 64 for verdict in judgement.verdicts.values())


def rows(change: Callable[[int, dict[str, Any]], dict[str, Any]]) -> Facts:
    """The good run with other values in its rows; change: of the row's number and the row, new values."""
    return dataclasses.replace(GOOD, rows=tuple({**row, **change(i, dict(row))} for i, row in enumerate(GOOD.rows)))


def part(name: str, **values: Any) -> Facts:
    return dataclasses.replace(GOOD, **{name: {**getattr(GOOD, name), **values}})


def figures(suite: str, **values: dict[str, Any]) -> Facts:
    """The good run with other figures of a suite; values: by the first word of the figure's name."""
    found = [
        {**result, "measures": [{**each, **values.get(each["name"].split()[0], {})} for each in result["measures"]]}
        if result["suite"] == suite
        else result
        for result in GOOD.results
    ]
    return dataclasses.replace(GOOD, results=tuple(found))


def figure(suite: str, name: str, value: float) -> Facts:
    """The good run with another value of a figure."""
    found = [
        {
            **result,
            "measures": [{**each, "value": value} if each["name"] == name else each for each in result["measures"]],
        }
        if result["suite"] == suite
        else result
        for result in GOOD.results
    ]
    return dataclasses.replace(GOOD, results=tuple(found))


def router(number: int, measure_name: str, value: float) -> Facts:
    def change(_: int, row: dict[str, Any]) -> dict[str, Any]:
        values = row["router"].get(measure_name)
        return (
            {"router": {**row["router"], measure_name: [value if i == number else x for i, x in enumerate(values)]}}
            if values
            else {}
        )

    return rows(change)


def idle(_: int, row: dict[str, Any]) -> dict[str, Any]:
    return {
        "load": [
            [0.0 if router == 2 and expert == 5 else x for expert, x in enumerate(shares)]
            for router, shares in enumerate(row["load"])
        ]
    }


N = len(GOOD.rows)
DOCTORED = {
    "NaN in a loss": (
        "quick",
        "finite",
        rows(lambda i, _: {"loss": None} if i == 7 else {}),
        "step 80: loss is not a finite number",
    ),
    "NaN in the gradient": (
        "standard",
        "finite",
        rows(lambda i, _: {"gradient_norm": None} if i == N - 1 else {}),
        "step 3000: gradient_norm",
    ),
    "NaN in a weight": (
        "quick",
        "finite",
        part("weights", not_finite=3, first="head"),
        "3 of 1,000 weights of step-1 .* the first in head",
    ),
    "large loss": (
        "quick",
        "loss",
        rows(lambda i, r: {"next_token_loss": 101.0}),
        "is 101 nats, of 30; at most 100 nats is allowed",
    ),
    "loss of production": (
        "production",
        "loss",
        rows(lambda i, r: {"next_token_loss": r["next_token_loss"] + 1}),
        "at most 3 nats is allowed",
    ),
    "no learning": (
        "standard",
        "below-uniform",
        rows(lambda i, r: {"next_token_loss": 10.9}),
        r"limit is ln 50272, is 10.9 nats.*below 10.83 nats",
    ),
    "equal probabilities": (
        "standard",
        "below-uniform",
        rows(lambda i, r: {"next_token_loss": math.log(50272)}),
        "below 10.83 nats is allowed",  # a strict threshold: on it is not below it
    ),
    "overflow on the threshold": (
        "standard",
        "router-overflow",
        router(3, "overflow", 0.05),
        "is 5 %, of 10; below 5 % is allowed",
    ),
    "rise at the end": (
        "standard",
        "falling",
        rows(lambda i, r: {"next_token_loss": r["next_token_loss"] * (1.1 if i >= N - 30 else 1)}),
        "change of the last losses from those before is 6.17 %, of 58; at most 2 % is allowed",
    ),
    "perplexity": ("standard", "perplexity", part("held_out", perplexity=1001.0), "1,000,000 held-out tokens is 1001"),
    "infinite perplexity": ("standard", "perplexity", part("held_out", perplexity=None), "not finite"),
    "above the band": (
        "full",
        "band",
        part("held_out", loss_nats_per_token=2.51),
        "2.5100, above the band.* from 2.3000 to 2.5000",
    ),
    "spikes of the loss": (
        "standard",
        "spikes",
        rows(lambda i, r: {"next_token_loss": 9.0} if i in (150, 220) else {}),
        "2 spikes in 284 .*at step 1510, 2210; at most 1",
    ),
    "spikes of the gradient": (
        "standard",
        "spikes",
        rows(lambda i, r: {"gradient_norm": 30.0} if i in (150, 220) else {}),
        "2 spikes",
    ),
    "large gradient": (
        "standard",
        "gradient-norm",
        rows(lambda i, r: {"gradient_norm": 101.0} if i == 99 else {}),
        "is 101, at step 1000",
    ),
    "growing gradient": (
        "standard",
        "norm-growth",
        rows(lambda i, r: {"gradient_norm": 1.3} if i > 0.7 * N else {}),
        "ratio of the last gradient norms to those of the second quarter is 2.6, .* at most 2 is allowed",
    ),
    "collapsed router": (
        "standard",
        "router-entropy",
        router(1, "entropy_normalised", 0.5),
        "router 1 has the smallest normalised entropy, 0.5000",
    ),
    "overflow": (
        "standard",
        "router-overflow",
        router(3, "overflow", 0.2),
        "overflow of router 3, the largest, is 20 %, of 10; below 5 % is allowed",
    ),
    "idle expert": (
        "standard",
        "idle-experts",
        rows(idle),
        "expert 5 of router 2 got no token in the last 10 recorded steps",
    ),
    "memory": ("standard", "memory", rows(lambda i, r: {"memory_gib": 127.0}), "127.00 GiB of 140.00 GiB of H200"),
    "slow": ("full", "throughput", part("plan", tokens_per_second=1.2e6), "0.833 of the planned 1,200,000"),
    "not deterministic": (
        "full",
        "determinism",
        part("determinism", differences=["1 of 9 tensors differ"]),
        "1 of 9 tensors differ",
    ),
    "not resumed": ("full", "resume", part("resume", differences=["3 of 9 tensors differ"]), "3 of 9 tensors differ"),
    "altered export": (
        "full",
        "export",
        part("export", problems=["export/model.safetensors was changed"]),
        "model.safetensors was changed",
    ),
    "other logits": ("full", "export", part("export", logits=False), "other logits than the checkpoint of step 1"),
    "at chance": (
        "full",
        "tasks",
        figures("choices", **{name: {"value": chance} for name, (chance, *_) in SETS.items()}),
        "hellaswag 0.000, arc_easy 0.000, piqa 0.000",
    ),
    "arithmetic": (
        "production",
        "gsm8k",
        figure("reasoning", "gsm8k exact_match", 0.4),
        "gsm8k exact_match is 0.4000 of 1,319",
    ),
    "tools": ("production", "tools", figure("tools", "irrelevance accuracy", 0.5), "irrelevance accuracy 0.500"),
    "code that does not compile": (
        "production",
        "compile-rate",
        figure("code", "compile_rate", 0.5),
        "compile_rate is 0.5000",
    ),
    "pass@1": ("production", "pass@1", figure("code", "humaneval pass@1", 0.2), "pass@1 is 0.2000"),
    "pass@5": ("production", "pass@5", figure("code", "humaneval pass@5", 0.4), "pass@5 is 0.4000"),
    "pass@10": ("production", "pass@10", figure("code", "humaneval pass@10", 0.5), "pass@10 is 0.5000"),
    "leak": ("production", "leak", figure("leak", "verbatim_train", 0.03), "verbatim_train is 0.0300 of 1,000"),
    "slow requests": (
        "production",
        "latency-p99",
        figures("latency", request_p50_ms={"value": 5100.0}, request_p99_ms={"value": 6000.0, "high": None}),
        "99 % quantile of 500 requests is 6 s; at most 5 s is allowed",
    ),
    "memory of generation": (
        "production",
        "generation-memory",
        figure("latency", "peak_memory_mib", 8000.0),
        "8.39 GB",
    ),
}


@pytest.mark.parametrize("name", DOCTORED)
def test_a_doctored_run_fails(name: str) -> None:
    preset_name, gate, facts, reason = DOCTORED[name]
    judgement = judged(preset_name, facts)
    verdict = judgement.verdicts[gate]
    assert verdict.outcome is Outcome.FAIL, verdict.reason
    assert re.search(reason, verdict.reason), verdict.reason
    assert judgement.outcome is Outcome.FAIL
    assert gate in judgement.stopping
    assert judgement.exit_code == 14


def test_losses_that_are_undecided_hold() -> None:
    """Few rows, or figures near the threshold: HOLD with the number that would decide; exit code 15."""
    few = dataclasses.replace(GOOD, rows=GOOD.rows[:4])
    judgement = judged("quick", few)
    assert judgement.verdicts["loss"].outcome is Outcome.HOLD
    assert "about 5 would decide it: set train.log_every lower" in judgement.verdicts["loss"].reason
    assert (judgement.outcome, judgement.exit_code) == (Outcome.HOLD, 15)
    reasons = {name: verdict.reason for name, verdict in judged("standard", few).verdicts.items()}
    assert "recorded steps after the warm-up: 0; 16 are needed" in reasons["falling"]
    assert "recorded steps after the warm-up: 0; 20 are needed" in reasons["norm-growth"]
    assert "about 32 recorded steps and the warm-up" in reasons["spikes"]

    near = judged("production", figure("reasoning", "gsm8k exact_match", 0.52)).verdicts["gsm8k"]
    assert near.outcome is Outcome.HOLD
    assert "1,691 items would decide it" in near.reason
    below = judged("full", part("held_out", loss_nats_per_token=2.29))
    assert below.outcome is Outcome.HOLD
    assert "below the band: look for held-out text in the training text" in below.verdicts["band"].reason
    noisy = judged("full", rows(lambda i, r: {"tokens_per_second": 1e6 * (1.3 if i % 2 else 1)})).verdicts["throughput"]
    assert noisy.outcome is Outcome.HOLD
    assert "the speed varies by 19%; at most 10% allows a verdict" in noisy.reason
    slow = judged("production", figures("latency", request_p99_ms={"count": 100, "high": None})).verdicts["latency-p99"]
    assert slow.outcome is Outcome.HOLD
    assert "--suite latency --limit 299 --json" in slow.reason


MISSING = {
    "rows": ("quick", dataclasses.replace(GOOD, rows=()), {"finite", "loss"}),
    "rows of standard": ("standard", dataclasses.replace(GOOD, rows=()), None),
    "weights": ("quick", dataclasses.replace(GOOD, weights=None), {"finite"}),
    "held-out text": ("full", dataclasses.replace(GOOD, held_out=None), {"perplexity", "band"}),
    "routers": (
        "standard",
        rows(lambda i, r: {"router": {}, "load": []}),
        {"router-entropy", "router-overflow", "idle-experts"},
    ),
    "machine": ("standard", dataclasses.replace(GOOD, machine=None), {"memory"}),
    "plan": ("full", dataclasses.replace(GOOD, plan=None), {"throughput"}),
    "steps again": (
        "full",
        dataclasses.replace(GOOD, determinism=None, resume={"problem": "2 processes"}),
        {"determinism", "resume"},
    ),
    "export": ("full", dataclasses.replace(GOOD, export=None), {"export"}),
    "logits": ("full", part("export", logits=None, logits_problem="the checkpoint is gone"), {"export"}),
    "results": (
        "production",
        dataclasses.replace(GOOD, results=()),
        {"gsm8k", "tools", "compile-rate", "pass@1", "pass@5", "pass@10", "leak", "latency-p99", "generation-memory"},
    ),
    "choices": ("full", dataclasses.replace(GOOD, results=()), {"tasks"}),
    "one set of tools": (
        "production",
        figures("tools", simple={"value": None, "problem": "no chat template"}),
        {"tools"},
    ),
}


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_never_passes(name: str) -> None:
    preset_name, facts, expected = MISSING[name]
    judgement = judged(preset_name, facts)
    missing = {gate for gate, verdict in judgement.verdicts.items() if verdict.outcome is Outcome.NOT_MEASURED}
    if expected is None:  # everything but the perplexity and the band is of the rows
        expected = set(judgement.verdicts) - {"perplexity", "band"}
    assert missing == expected, {gate: verdict.reason for gate, verdict in judgement.verdicts.items()}
    assert not judgement.passed
    assert judgement.exit_code == 15
    assert judgement.outcome is Outcome.NOT_MEASURED


def test_the_command_that_computes_a_missing_figure_is_named() -> None:
    facts = dataclasses.replace(GOOD, results=(), foreign_results=("a.json: the result of code is of another model",))
    reasons = {name: verdict.reason for name, verdict in judged("production", facts).verdicts.items()}
    assert "cdrmix eval --model RUN --suite reasoning --json > FILE.json, then --results FILE.json" in reasons["gsm8k"]
    assert "a.json: the result of code is of another model" in reasons["compile-rate"]
    refused = judged("production", figures("tools", simple={"value": None, "problem": "no chat template"}))
    assert "tools: simple accuracy was not measured: no chat template" in refused.verdicts["tools"].reason


def test_a_bad_step_fails_before_there_is_a_checkpoint() -> None:
    facts = rows(lambda i, r: {"loss": None} if i == 7 else {})
    assert judged("quick", dataclasses.replace(facts, weights=None)).verdicts["finite"].outcome is Outcome.FAIL


def test_steps_of_stage_b_are_finite_too() -> None:
    phase = {"phase": "imitation", "step": 3010, "loss": 1.0, "gradient_norm": 0.5}
    assert judged("quick", dataclasses.replace(GOOD, phases=(phase,))).passed
    found = judged("quick", dataclasses.replace(GOOD, phases=(phase, {**phase, "step": 3020, "loss": math.nan})))
    assert found.verdicts["finite"].outcome is Outcome.FAIL
    assert found.verdicts["finite"].reason == "step 3020: loss is not a finite number"


def test_gates_without_a_meaning_are_left_out() -> None:
    dense = judged("standard", part("settings", routed=False))
    assert dense.passed
    assert not {"router-entropy", "router-overflow", "idle-experts"} & set(dense.verdicts)
    pairs = judged("standard", part("settings", preferences=True))
    assert not {"below-uniform", "perplexity"} & set(pairs.verdicts)
    first = judged("full", part("forecast", band=False, low=None, high=None, notes=["1 of at least 2 rungs"]))
    assert first.verdicts["band"].outcome is Outcome.NOT_MEASURED
    assert first.passed
    assert "band" not in first.required


def test_facts_survive_json_and_their_digest_tells_them_apart() -> None:
    stored = Facts.from_json(json.loads(json.dumps(GOOD.as_json())))
    assert stored.digest() == GOOD.digest()
    assert {n: v.outcome for n, v in judged("production", stored).verdicts.items()} == {
        n: v.outcome for n, v in judged("production", GOOD).verdicts.items()
    }
    changed = part("plan", tokens_per_second=1.1e6)
    assert changed.digest("rows") == GOOD.digest("rows")
    assert changed.digest("rows", "plan") != GOOD.digest("rows", "plan")
    with pytest.raises(ValueError, match="expected the parts"):
        Facts.from_json({"rows": []})


@pytest.mark.long  # 1,000 runs
def test_of_simulated_good_runs_few_are_stopped() -> None:
    """Fewer than 6 % of 1,000 runs whose true figures are good are stopped by any gate, failed or undecided."""
    rng = np.random.default_rng(3)
    stopping: dict[str, list[tuple[str, ...]]] = {"full": [], "production": []}
    for _ in range(1000):
        facts = good_facts(rng, rows=200)
        for name, stopped in stopping.items():
            stopped.append(judged(name, facts).stopping)
    for name, stopped in stopping.items():
        assert sum(map(bool, stopped)) < 60, (name, Counter(itertools.chain.from_iterable(stopped)))
