"""The suite `domains`: bits per byte of the held-out text by domain, with intervals over documents.

The values are those of `cdrmix eval --model` for the same text. Intervals: 95 %, bootstrap over documents, whose tokens
stay together (ratio of the sums of bits and of bytes).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cdrmix.data.shards import Array
from cdrmix.errors import ConfigError
from cdrmix.eval.intervals import LEAST_UNITS, ratio_interval
from cdrmix.eval.perplexity import Score
from cdrmix.eval.suites import SUITES, Measure, Subject, SuiteOptions, SuiteResult
from cdrmix.run_folder import finite


@SUITES("domains")
def domains(subject: Subject, options: SuiteOptions, say: Callable[[str], None]) -> SuiteResult:
    """See the docstring of the module. Raises CdrmixError if the model has no prepared text."""
    if subject.documents is None:
        raise ConfigError(f"--suite domains: {subject.name} gives no scores of held-out documents")
    scored = subject.documents()
    bits = scored.nats / math.log(2)
    names = np.array(scored.domains)
    measures = [_measure("bits_per_byte", scored.score, bits, scored.text_bytes)]
    for name, score in scored.score.domains.items():
        chosen = names == name
        measures.append(_measure(f"{name} bits_per_byte", score, bits[chosen], scored.text_bytes[chosen]))
    facts: dict[str, Any] = finite({**scored.score.as_json(), "documents": len(bits)})
    notes = [
        f"{measure.name}: no interval, because there are fewer than {LEAST_UNITS} documents"
        for measure in measures
        if measure.count < LEAST_UNITS and measure.problem is None
    ]
    if not scored.score.domains:
        notes.append(f"the held-out text has one domain, {scored.domains[0]!r}")
    return SuiteResult("domains", tuple(measures), facts, tuple(notes))


def _measure(name: str, score: Score, bits: Array, text_bytes: Array) -> Measure:
    if not math.isfinite(score.bits_per_byte):
        return Measure(name, count=len(bits), problem="the loss is not finite; the weights may hold NaN or infinity")
    low, high = ratio_interval(bits.tolist(), text_bytes.tolist())
    return Measure(name, score.bits_per_byte, low, high, len(bits))
