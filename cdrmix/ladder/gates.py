"""Gates on the training: finite numbers, loss, stability, routers, memory and speed.

A gate is a pure function of the recorded facts of a run. It passes where the confidence bound of its figure clears the
threshold, fails where the other bound misses it, and holds otherwise, with the number of items that would decide it.
A figure that counts all that is recorded has no sampling error; it passes or fails.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cdrmix.ladder import bounds
from cdrmix.ladder.facts import Facts, Json
from cdrmix.ladder.verdict import Comparison, Outcome, Verdict

Gate = Callable[[Facts], Verdict]

WINDOW, LEAST_WINDOW = 128, 16  # rows before a row that is compared with them (SkipStep of OLMo-core: 128)
SIGMAS = 6.0
ROUTER_ROWS = 10
LEAST_TENTH = 8  # rows, where a tenth of the run has fewer: 5 do not show a small difference
LEAST_VALUE, MOST_LOG = 1e-12, 700.0  # of a ratio: no logarithm of 0, no infinite exponential
NOT_FINITE = 1e9  # stands for a loss that is NaN or infinite
RISE = 0.02  # the losses of two seeds of a micro rung differ by up to 1.9 %, so less is no rise
NO_ROWS = "metrics.jsonl has no step of stage A; train the run, or name another one"
MORE_ROWS = "set train.log_every lower, or train longer"


def figure(value: float, unit: str) -> str:
    """A number with its unit. %: a share, such as 0.05, is shown as 5 %."""
    return f"{100 * value:.3g} %" if unit == "%" else f"{value:.4g} {unit}".rstrip()


def not_measured(reason: str) -> Verdict:
    """A verdict on a figure that is missing. reason: with the command that computes it."""
    return Verdict(Outcome.NOT_MEASURED, reason)


def exactly(
    good: bool,
    reason: str,
    *,
    value: float | None = None,
    threshold: float | None = None,
    n: int,
    comparison: Comparison = "at most",
    unit: str = "",
) -> Verdict:
    """A verdict on what has no sampling error: it passes or fails."""
    outcome = Outcome.PASS if good else Outcome.FAIL
    return Verdict(outcome, reason, value, threshold=threshold, n=n, comparison=comparison, unit=unit)


def by_bounds(
    found: bounds.Bounds,
    threshold: float,
    n: int,
    p_value: float,
    what: str,
    *,
    needed: int | None,
    more: str = MORE_ROWS,
    comparison: Comparison = "at most",
    unit: str = "",
) -> Verdict:
    """A verdict on a figure that must be at most, or below, `threshold`.

    what: the figure in words. needed: items that would decide it; None: unknown. more: how to get them.
    """
    outcome = Outcome.HOLD
    shown = [figure(number, unit) for number in (found.value, threshold)]
    reason = f"{what} is {shown[0]}, of {n:,}; {comparison} {shown[1]} is allowed"
    limit = largest_allowed(threshold, comparison)
    if found.high <= limit:
        outcome = Outcome.PASS
    elif found.low > limit:
        outcome = Outcome.FAIL
    else:
        count = "more" if needed is None else f"about {max(needed, n + 1):,}"
        reason += f"; {count} would decide it: {more}"
    low, high = (None if math.isinf(bound) else bound for bound in (found.low, found.high))
    return Verdict(outcome, reason, found.value, low, high, threshold, n, comparison, p_value, unit=unit)


def largest_allowed(threshold: float, comparison: Comparison) -> float:
    """The largest figure that passes: the threshold, or the number before it."""
    return math.nextafter(threshold, -math.inf) if comparison == "below" else threshold


def of_median(
    values: Sequence[float], threshold: float, what: str, *, comparison: Comparison = "at most", unit: str = ""
) -> Verdict:
    """A verdict on a median that must be at most, or below, `threshold`."""
    values = bounds.blocks(values)
    found = bounds.median_bounds(values)
    needed = bounds.items_for_median(values, threshold)
    if len(values) < bounds.LEAST_FOR_MEDIAN:
        needed = bounds.LEAST_FOR_MEDIAN
    p_value = bounds.median_p_value(values, largest_allowed(threshold, comparison))
    n = len(values)
    return by_bounds(found, threshold, n, p_value, what, needed=needed, comparison=comparison, unit=unit)


def finite(facts: Facts) -> Verdict:
    """Every recorded loss and gradient norm, and every weight of the newest checkpoint, is a finite number."""
    if not facts.rows:
        return not_measured(NO_ROWS)
    for row in (*facts.rows, *facts.phases):
        names = ("loss", "gradient_norm", "next_token_loss") if "next_token_loss" in row else ("loss", "gradient_norm")
        for name in names:
            if row.get(name) is None:
                return exactly(False, f"step {row['step']}: {name} is not a finite number", n=len(facts.rows))
    if facts.weights is None:
        return not_measured("the run has no complete checkpoint; continue it with cdrmix train --resume auto")
    bad, values = facts.weights["not_finite"], facts.weights["values"]
    if bad:
        return exactly(
            False,
            f"{bad:,} of {values:,} weights of {facts.weights['checkpoint']} are not finite, the first in "
            f"{facts.weights['first']}",
            value=bad,
            threshold=0,
            n=values,
        )
    reason = f"{len(facts.rows) + len(facts.phases):,} recorded steps and {values:,} weights are finite"
    return exactly(True, reason, value=0, threshold=0, n=values)


def loss_at_most(limit: float) -> Gate:
    """The median loss of the last tenth of the recorded steps, nats per token."""

    def loss(facts: Facts) -> Verdict:
        if not facts.rows:
            return not_measured(NO_ROWS)
        return of_median(_losses(_tenth(facts.rows)), limit, "the median loss of the last recorded steps", unit="nats")

    return loss


def below_uniform(facts: Facts) -> Verdict:
    """The loss after the warm-up is below that of equal probabilities of all tokens, ln V."""
    rows, vocabulary = facts.after_warmup(), facts.settings["vocabulary"]
    if not facts.rows:
        return not_measured(NO_ROWS)
    if not rows:
        return Verdict(Outcome.HOLD, f"no step after the warm-up is recorded; {MORE_ROWS}")
    what = f"the median loss after the warm-up, whose limit is ln {vocabulary},"
    return of_median(_losses(_tenth(rows)), math.log(vocabulary), what, comparison="below", unit="nats")


def falling(facts: Facts) -> Verdict:
    """The median loss of the last tenth is not above that of the tenth before, by more than RISE of it."""
    rows = facts.after_warmup()
    if not facts.rows:
        return not_measured(NO_ROWS)
    last = _tenth(rows)
    before = rows[-2 * len(last) : -len(last)]
    if len(before) < LEAST_TENTH:
        needed = 2 * LEAST_TENTH
        return Verdict(Outcome.HOLD, f"recorded steps after the warm-up: {len(rows)}; {needed} are needed: {MORE_ROWS}")
    what = "the change of the last losses from those before"
    return _ratio(_losses(last), _losses(before), 1 + RISE, what, change=True)


def perplexity_at_most(limit: float) -> Gate:
    """The perplexity per token of all held-out text."""

    def perplexity(facts: Facts) -> Verdict:
        if facts.held_out is None:
            return not_measured("the held-out text was not measured; continue the run with cdrmix train --resume auto")
        value, tokens = facts.held_out.get("perplexity"), facts.held_out.get("tokens", 0)
        if value is None:
            return exactly(False, "the perplexity of the held-out text is not finite", threshold=limit, n=tokens)
        reason = f"the perplexity of all {tokens:,} held-out tokens is {value:.4g}; at most {limit:g} is allowed"
        return exactly(value <= limit, reason, value=value, threshold=limit, n=tokens)

    return perplexity


def spikes(facts: Facts) -> Verdict:
    """At most one recorded step in 1,000 has a loss or gradient norm above mean + 6 sd of the 128 recorded before."""
    rows, warmup = facts.rows, facts.settings["warmup_steps"]
    if not rows:
        return not_measured(NO_ROWS)
    figures = [
        np.array([math.nan if row[name] is None else row[name] for row in rows], float)
        for name in ("next_token_loss", "gradient_norm")
    ]
    judged = [index for index in range(LEAST_WINDOW, len(rows)) if rows[index]["step"] > warmup]
    found = [rows[index]["step"] for index in judged if any(_is_spike(values, index) for values in figures)]
    if len(judged) < LEAST_WINDOW:
        needed = 2 * LEAST_WINDOW
        return Verdict(
            Outcome.HOLD,
            f"recorded steps that can be compared with {LEAST_WINDOW} before them: {len(judged)}; {LEAST_WINDOW} are "
            f"needed, so about {needed} recorded steps and the warm-up: {MORE_ROWS}",
            n=len(judged),
        )
    allowed = max(1, len(judged) // 1000)
    steps = f", at step {', '.join(map(str, found[:5]))}{', ...' if len(found) > 5 else ''}" if found else ""
    reason = f"{len(found)} spikes in {len(judged):,} recorded steps{steps}; at most {allowed} allowed"
    return exactly(len(found) <= allowed, reason, value=len(found), threshold=allowed, n=len(judged))


def _is_spike(values: np.ndarray[Any, np.dtype[np.float64]], index: int) -> bool:
    """Whether a value is far above those before it. NaN is a spike, and counts for no later one."""
    window = values[max(0, index - WINDOW) : index]
    window = window[~np.isnan(window)]
    if math.isnan(values[index]) or len(window) < 2:
        return math.isnan(values[index])
    mean = window.mean()
    # A constant figure has no deviation; a thousandth of it is no spike.
    return bool(values[index] > mean + SIGMAS * max(window.std(ddof=1), abs(mean) / 1000))


def gradient_norm_at_most(limit: float) -> Gate:
    """The largest recorded norm of the gradient after the warm-up, before clipping."""

    def gradient_norm(facts: Facts) -> Verdict:
        rows = facts.after_warmup() or facts.rows
        norms = [(row["gradient_norm"], row["step"]) for row in rows if row["gradient_norm"] is not None]
        if not norms:
            return not_measured(NO_ROWS)
        value, step = max(norms)
        reason = f"the largest of {len(norms):,} recorded gradient norms is {value:.4g}, at step {step}"
        return exactly(
            value <= limit, f"{reason}; at most {limit:g} is allowed", value=value, threshold=limit, n=len(norms)
        )

    return gradient_norm


def norm_growth(facts: Facts) -> Verdict:
    """The gradient norm of the last quarter is at most twice that of the second quarter."""
    if not facts.rows:
        return not_measured(NO_ROWS)
    norms = [row["gradient_norm"] for row in facts.after_warmup() if row["gradient_norm"] is not None]
    quarter = len(norms) // 4
    if quarter < bounds.LEAST_FOR_MEDIAN:
        needed = 4 * bounds.LEAST_FOR_MEDIAN
        return Verdict(
            Outcome.HOLD, f"recorded steps after the warm-up: {len(norms)}; {needed} are needed: {MORE_ROWS}"
        )
    what = "the ratio of the last gradient norms to those of the second quarter"
    return _ratio(norms[-quarter:], norms[quarter : 2 * quarter], 2, what, change=False)


def router_entropy_at_least(limit: float) -> Gate:
    """The normalised entropy of the load of each router, in the last recorded steps."""

    def router_entropy(facts: Facts) -> Verdict:
        # Minus the entropy must be at most minus the limit.
        name, values = _worst_router(facts, "entropy_normalised", sign=-1)
        if not values:
            return not_measured(_NO_ROUTERS)
        found = of_median([-value for value in values], -limit, "minus the entropy")
        low, high = (None if bound is None else -bound for bound in (found.high, found.low))
        value = statistics.median(values)
        reason = f"router {name} has the smallest normalised entropy, {value:.4f} in {len(values)} recorded steps"
        return Verdict(
            found.outcome,
            f"{reason}; at least {limit:g} is required",
            value,
            low,
            high,
            limit,
            len(values),
            "at least",
            found.p_value,
        )

    return router_entropy


def router_overflow_below(limit: float) -> Gate:
    """The share of the routes of each router above its experts' capacity, in the last recorded steps."""

    def router_overflow(facts: Facts) -> Verdict:
        name, values = _worst_router(facts, "overflow", sign=1)
        if not values:
            return not_measured(_NO_ROUTERS)
        what = f"the overflow of router {name}, the largest,"
        return of_median(values, limit, what, comparison="below", unit="%")

    return router_overflow


def idle_experts(facts: Facts) -> Verdict:
    """No expert is without a token in all of the last recorded steps."""
    rows = [row for row in facts.rows if row.get("load")][-ROUTER_ROWS:]
    if not rows:
        return not_measured(_NO_ROUTERS)
    names = rows[-1].get("routers") or [str(number) for number in range(len(rows[-1]["load"]))]
    idle = [
        f"expert {expert} of router {names[router]}"
        for router, shares in enumerate(rows[-1]["load"])
        for expert in range(len(shares))
        if all(row["load"][router][expert] == 0 for row in rows)
    ]
    experts = sum(len(shares) for shares in rows[-1]["load"])
    text = (
        f"{', '.join(idle[:5])}{', ...' if len(idle) > 5 else ''} got no token" if idle else "every expert got tokens"
    )
    reason = f"{text} in the last {len(rows)} recorded steps; {len(idle)} of {experts} experts are idle"
    return exactly(not idle, reason, value=len(idle), threshold=0, n=experts)


def memory_share_below(share: float) -> Gate:
    """The peak memory of the training as a share of that of the machine."""

    def memory_share(facts: Facts) -> Verdict:
        peaks = [row["memory_gib"] for row in facts.rows if row.get("memory_gib") is not None]
        if not peaks:
            return not_measured(NO_ROWS)
        if facts.machine is None or facts.machine.get("memory_bytes") is None:
            return not_measured(
                "the run was trained on another machine, whose memory is not recorded: judge the run on that machine"
            )
        limit = facts.machine["memory_bytes"]
        value = max(peaks) * 2**30 / limit
        reason = f"the peak is {max(peaks):.2f} GiB of {limit / 2**30:.2f} GiB of {facts.machine['name']}"
        return exactly(
            value < share,
            f"{reason}; less than {share:.0%} is allowed",
            value=value,
            threshold=share,
            n=len(peaks),
            comparison="below",
            unit="%",
        )

    return memory_share


def throughput_at_least(share: float, most_spread: float = 0.10) -> Gate:
    """The median speed of the training as a share of the plan's. Holds where the speed varies by more than a tenth."""

    def throughput(facts: Facts) -> Verdict:
        speeds = [row["tokens_per_second"] for row in facts.rows[1:] if row.get("tokens_per_second")]
        if not speeds:
            return not_measured(NO_ROWS)
        if facts.plan is None:
            return not_measured(
                "the plan has no speed for this device: name the planned one with --tokens-per-second, or measure that "
                "of 20 steps with --measure"
            )
        planned = facts.plan["tokens_per_second"]
        ratios = bounds.blocks([speed / planned for speed in speeds])
        middle = statistics.median(ratios)
        spread = statistics.median(abs(ratio - middle) for ratio in ratios) * 1.4826 / middle  # sd of normal values
        text = f"{middle:.3f} of the planned {planned:,.0f} tokens per second ({facts.plan['source']})"
        if spread > most_spread:
            reason = f"{text}, but the speed varies by {spread:.0%}; at most {most_spread:.0%} allows a verdict"
            return Verdict(Outcome.HOLD, reason, middle, threshold=share, n=len(ratios), comparison="at least")
        found = of_median([-ratio for ratio in ratios], -share, "minus the speed")
        low, high = (None if bound is None else -bound for bound in (found.high, found.low))
        reason = f"{text}; at least {share:g} is required"
        return Verdict(found.outcome, reason, middle, low, high, share, len(ratios), "at least", found.p_value)

    return throughput


_NO_ROUTERS = "metrics.jsonl has no figures of the routers, though the model has routers; train the run again"


def _tenth(rows: Sequence[Json]) -> Sequence[Json]:
    return rows[-max(LEAST_TENTH, len(rows) // 10) :]


def _losses(rows: Sequence[Json]) -> list[float]:
    return [NOT_FINITE if row["next_token_loss"] is None else row["next_token_loss"] for row in rows]


def _ratio(later: Sequence[float], earlier: Sequence[float], most: float, what: str, *, change: bool) -> Verdict:
    """A verdict on the ratio of two samples that must be at most `most`: bounds of the shift of their logarithms.

    change: the figures are the ratio minus 1, in percent.
    """
    logs, logs_before = (
        bounds.blocks([math.log(max(value, LEAST_VALUE)) for value in values]) for values in (later, earlier)
    )
    shift, threshold = bounds.shift_bounds(logs, logs_before), math.log(most)
    p_value = bounds.shift_p_value(logs, logs_before, threshold)
    n, distance = len(logs) + len(logs_before), abs(shift.value - threshold)
    # The bounds approach the figure with the square root of the number.
    width = max(shift.high - shift.value, shift.value - shift.low)
    needed = None if distance == 0 or not math.isfinite(width) else math.ceil(n * (width / distance) ** 2)
    less, unit = (1, "%") if change else (0, "")
    found = bounds.Bounds(*(math.exp(min(bound, MOST_LOG)) - less for bound in shift))
    if math.isinf(shift.high):
        found = bounds.Bounds(found.value, -math.inf, math.inf)
    return by_bounds(found, most - less, n, p_value, what, needed=needed, unit=unit)


def _worst_router(facts: Facts, measure: str, *, sign: int) -> tuple[str, list[float]]:
    """The router with the largest median of sign * measure in the last recorded steps, and its values."""
    rows: list[Any] = [row for row in facts.rows if (row.get("router") or {}).get(measure)][-ROUTER_ROWS:]
    if not rows:
        return "", []
    by_router = list(zip(*(row["router"][measure] for row in rows), strict=True))
    index = max(range(len(by_router)), key=lambda router: sign * statistics.median(by_router[router]))
    names = rows[-1].get("routers") or list(map(str, range(len(by_router))))
    return names[index], list(by_router[index])
