"""Gates on what a run left: its export, the steps that were trained again, the forecast, and the results of suites."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cdrmix.confidence import binomial_cdf, items_for_quantile
from cdrmix.ladder import bounds
from cdrmix.ladder.facts import Facts, Json
from cdrmix.ladder.gates import Gate, exactly, not_measured
from cdrmix.ladder.verdict import Outcome, Verdict

TWO_SIDED = 1.959964 / bounds.Z  # the intervals of suites are two-sided, with 95 %
NOISY = ("boolq", "openbookqa")  # too noisy to rank small models (the configuration of OLMo-core's ladder)


@dataclass(frozen=True)
class Share:
    """A share of items with its one-sided bounds. of: what was pooled. error: its standard error."""

    found: bounds.Bounds
    n: int

    @property
    def error(self) -> float:
        """The standard error: the wider side of the interval."""
        return max(self.found.high - self.found.value, self.found.value - self.found.low) / bounds.Z


def same_again(part: str, what: str) -> Gate:
    """Steps that were trained again have the same bits. part: determinism or resume."""

    def again(facts: Facts) -> Verdict:
        found: Json | None = getattr(facts, part)
        if found is None:
            return not_measured(f"{what} were not trained again: add --measure")
        if found.get("problem") is not None:
            return not_measured(f"{what} cannot be trained again here: {found['problem']}")
        differences = found["differences"]
        reason = f"{what}: {'the same bits' if not differences else '; '.join(differences[:3])}"
        return exactly(not differences, reason, value=len(differences), threshold=0, n=found["steps"])

    return again


def export_agrees(facts: Facts) -> Verdict:
    """The export has the bytes that SHA256SUMS says, and gives the logits of its checkpoint."""
    found = facts.export
    if found is None:
        return not_measured("the run has no export: cdrmix export --model RUN")
    files = len(found["files"])
    if found["problems"]:
        return exactly(False, "; ".join(found["problems"]), value=len(found["problems"]), threshold=0, n=files)
    if found["logits"] is None:
        return not_measured(f"the logits of step {found['step']} cannot be compared: {found['logits_problem']}")
    if found["logits"]:
        return exactly(
            True,
            f"{files} files with their checksums; the logits of step {found['step']}",
            value=0,
            threshold=0,
            n=files,
        )
    reason = f"the export gives other logits than the checkpoint of step {found['step']}: export it again"
    return exactly(False, reason, value=1, threshold=0, n=files)


def in_band(facts: Facts) -> Verdict:
    """The held-out loss is in the band of the forecast. Below the band a person has to decide."""
    found = facts.forecast
    if found is None:
        return not_measured("no forecast was given: cdrmix ladder forecast --json, then --forecast FILE")
    if not found["band"]:
        return not_measured("; ".join(found["notes"]) or "there are too few smaller rungs for a forecast")
    low, high = found["low"], found["high"]
    value = None if facts.held_out is None else facts.held_out.get("loss_nats_per_token")
    if value is None:
        return not_measured(
            "the held-out loss of the run was not measured; continue it with cdrmix train --resume auto"
        )
    outcome = Outcome.FAIL if value > high else Outcome.HOLD if value < low else Outcome.PASS
    reasons = {
        Outcome.PASS: "inside of the band",
        Outcome.FAIL: "above the band: look for the reason before a larger rung is trained",
        Outcome.HOLD: "below the band: look for held-out text in the training text, or for another text",
    }
    reason = f"the held-out loss is {value:.4f}, {reasons[outcome]} from {low:.4f} to {high:.4f}"
    return Verdict(outcome, reason, value, low, high, high, found["rungs"], unit="nats")


def suite_share(suite: str, name: str, limit: float, command: str, *, at_least: bool) -> Gate:
    """A share of a suite is at least, or else at most, `limit`. command: computes it."""

    def gate(facts: Facts) -> Verdict:
        measures = facts.measures(suite, name)
        share = pooled(measures)
        if share is None:
            return _missing(facts, measures, name, command)
        return of_share(share, limit, name, at_least=at_least)

    return gate


def pooled(measures: Sequence[Json]) -> Share | None:
    """The mean of repeated measurements of one share, by their number of items; None if there is none.

    Repeats move the share and do not narrow its interval, because they can be of the same items.
    """
    known = [measure for measure in measures if measure["value"] is not None and measure["count"] > 0]
    if not known:
        return None
    total = sum(measure["count"] for measure in known)
    n = max(measure["count"] for measure in known)
    value = sum(measure["value"] * measure["count"] for measure in known) / total
    if not 0 <= value <= 1:
        raise ValueError(f"{known[0]['name']} is {value:g}, which is no share of items")
    least = bounds.wilson(value, n)
    if any(measure["low"] is None or measure["high"] is None or measure["low"] == measure["high"] for measure in known):
        return Share(least, n)
    below = max(measure["value"] - measure["low"] for measure in known) / TWO_SIDED
    above = max(measure["high"] - measure["value"] for measure in known) / TWO_SIDED
    return Share(bounds.Bounds(value, max(0.0, value - below), min(1.0, value + above)), n)


def of_share(share: Share, limit: float, name: str, *, at_least: bool) -> Verdict:
    """A verdict on a share that must be at least, or at most, `limit`."""
    value, low, high = share.found
    good, bad = (low >= limit, high < limit) if at_least else (high <= limit, low > limit)
    outcome = Outcome.PASS if good else Outcome.FAIL if bad else Outcome.HOLD
    word = "at least" if at_least else "at most"
    reason = f"{name} is {value:.4f} of {share.n:,} items, {low:.4f} to {high:.4f}; {word} {limit:g} is required"
    if outcome is Outcome.HOLD:
        needed = bounds.items_for_share(value, limit)
        reason += (
            "; more items would decide it"
            if needed is None
            else f"; {max(needed, share.n + 1):,} items would decide it"
        )
    p_value = bounds.share_p_value(value, share.n, limit)
    if not at_least:
        p_value = bounds.share_p_value(1 - value, share.n, 1 - limit)
    return Verdict(outcome, reason, value, low, high, limit, share.n, "at least" if at_least else "at most", p_value)


def above_chance(margin: float, command: str) -> Gate:
    """The mean over the sets of suite `choices` of accuracy minus chance, all of which must be measured.

    Sets that are too noisy are left out. A set that is missing would raise the mean if the model is bad at it.
    """

    def tasks(facts: Facts) -> Verdict:
        for name in _sets(facts):
            measures = facts.measures("choices", f"{name} accuracy")
            if pooled(measures) is None:
                return _missing(facts, measures, f"choices: {name}", command)
        chances = {
            name: chance
            for result in facts.results
            if result["suite"] == "choices"
            for name, chance in result["facts"].get("chance", {}).items()
            if name not in NOISY
        }
        found = {name: pooled(facts.measures("choices", f"{name} accuracy")) for name in chances}
        shares = {name: share for name, share in found.items() if share is not None}
        if not shares:
            return _missing(facts, facts.measures("choices", "choices"), "accuracy above chance", command)
        return _of_mean(shares, chances, margin, "accuracy above chance")

    return tasks


def _sets(facts: Facts) -> list[str]:
    """The sets that results of suite `choices` name, measured or not, without those that are too noisy."""
    suffix = " accuracy"
    names = [
        measure["name"].removesuffix(suffix)
        for result in facts.results
        if result["suite"] == "choices"
        for measure in result["measures"]
        if measure["name"].endswith(suffix)
    ]
    return [name for name in dict.fromkeys(names) if name not in NOISY]


def mean_at_least(suite: str, names: Sequence[str], limit: float, command: str) -> Gate:
    """The mean of some shares of a suite, all of which must be measured."""

    def mean(facts: Facts) -> Verdict:
        shares = {}
        for name in names:
            measures = facts.measures(suite, name)
            share = pooled(measures)
            if share is None:
                return _missing(facts, measures, f"{suite}: {name}", command)
            shares[name] = share
        return _of_mean(shares, dict.fromkeys(names, 0.0), limit, suite)

    return mean


def _of_mean(shares: Mapping[str, Share], chances: Mapping[str, float], limit: float, what: str) -> Verdict:
    """A verdict on the mean of shares of independent items, minus chances, that must be at least `limit`."""
    value = sum(share.found.value - chances[name] for name, share in shares.items()) / len(shares)
    error = math.sqrt(sum(share.error**2 for share in shares.values())) / len(shares)
    low, high = value - bounds.Z * error, value + bounds.Z * error
    n = sum(share.n for share in shares.values())
    outcome = Outcome.PASS if low >= limit else Outcome.FAIL if high < limit else Outcome.HOLD
    each = ", ".join(f"{name} {share.found.value - chances[name]:.3f}" for name, share in shares.items())
    reason = f"the mean of {what} is {value:.4f} ({each}); at least {limit:g} is required"
    if outcome is Outcome.HOLD:
        needed = math.ceil(n * (bounds.Z * error / max(abs(value - limit), 1e-9)) ** 2)
        reason += f"; about {max(needed, n + 1):,} items would decide it"
    p_value = bounds.normal_p_value(value - limit, error)
    return Verdict(outcome, reason, value, low, high, limit, n, "at least", p_value)


def latency_at_most(seconds: float, command: str) -> Gate:
    """The 99 % quantile of the seconds of a request, as suite `latency` measures them: the worst of its results.

    It passes where the bound of the quantile is at most `seconds`. It fails where so many requests took longer that
    fewer than 5 % of the samples of a quantile of `seconds` have as many.
    """

    def latency(facts: Facts) -> Verdict:
        found = [measure for measure in facts.measures("latency", "request_p99_ms") if measure["value"] is not None]
        if not found:
            return _missing(facts, facts.measures("latency", "request_p99_ms"), "the latency", command)
        worst = max(found, key=lambda measure: measure["value"])
        n, value, high = worst["count"], worst["value"] / 1000, worst["high"]
        medians = [measure["value"] for measure in facts.measures("latency", "request_p50_ms") if measure["value"]]
        above = 0
        for share, figure in ((0.99, value), (0.5, max(medians, default=0.0) / 1000)):
            if figure > seconds:  # the figure is one of the requests: it and all above it are too slow
                above = max(above, n - math.ceil(share * n) + 1)
        p_value = 1 - binomial_cdf(above - 1, n, 0.01)
        outcome = Outcome.FAIL if p_value <= bounds.ERROR else Outcome.HOLD
        if high is not None and high / 1000 <= seconds:
            outcome = Outcome.PASS
        reason = f"the 99 % quantile of {n:,} requests is {value:.3g} s"
        reason += "" if high is None else f", at most {high / 1000:.3g} s with 95 % confidence"
        reason += f"; at most {seconds:g} s is allowed"
        if outcome is Outcome.HOLD:
            needed = max(items_for_quantile(above, 0.99), n + 1)
            reason += f"; {needed:,} requests would decide it: {command.replace('--json', f'--limit {needed} --json')}"
        bound = None if high is None else high / 1000
        return Verdict(outcome, reason, value, None, bound, seconds, n, p_value=p_value, unit="s")

    return latency


def memory_at_most(gigabytes: float, command: str) -> Gate:
    """The peak memory of the process that generates text, in suite `latency`: the largest of its results."""

    def memory(facts: Facts) -> Verdict:
        measures = facts.measures("latency", "peak_memory_mib")
        peaks = [measure["value"] for measure in measures if measure["value"] is not None]
        if not peaks:
            return _missing(facts, measures, "the memory of generation", command)
        value = max(peaks) * 2**20 / 1e9
        reason = f"the peak memory of generation is {value:.2f} GB; at most {gigabytes:g} GB is allowed"
        return exactly(value <= gigabytes, reason, value=value, threshold=gigabytes, n=len(peaks), unit="GB")

    return memory


def _missing(facts: Facts, measures: Sequence[Json], name: str, command: str) -> Verdict:
    """A verdict on a figure that no result has: with the problem of the suite, or the command that computes it."""
    problems = [measure["problem"] for measure in measures if measure.get("problem")]
    text = f"{name} was not measured"
    if problems:
        return not_measured(f"{text}: {problems[-1]}")
    unused = f" ({'; '.join(facts.foreign_results)})" if facts.foreign_results else ""
    return not_measured(f"{text}{unused}: {command}, then --results FILE.json")
