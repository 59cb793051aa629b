"""The suite `routing`: how evenly the routers of a model use their experts on held-out text.

layerN entropy: entropy of the load of the experts over log2 of their number, from 0 to 1; its 95 % interval by
    bootstrap over rows. layerN overflow: the share of routes above a capacity of capacity_factor times the mean load,
    in groups of as many rows, drawn at random, as a global batch in training has; its mean over the groups, with its
    interval by bootstrap. layerN idle: experts without a route in all of these rows. See routing.py.
entropy_min, overflow_max, idle_experts: the least, the greatest and the sum over layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.config.schema_model import Model
from cdrmix.data.loader import make_batch
from cdrmix.data.shards import Split
from cdrmix.errors import CdrmixError
from cdrmix.eval.intervals import LEAST_UNITS, RESAMPLES, mean_interval
from cdrmix.eval.routing import CAPACITY, routing_metrics
from cdrmix.eval.suites import SUITES, Measure, Subject, SuiteOptions, SuiteResult
from cdrmix.model.causal import evaluation_mode
from cdrmix.model.loss import LossModule

ROWS = 256  # of held-out text without --limit, drawn at random
NAMES = ("entropy_min", "overflow_max", "idle_experts")


@SUITES("routing")
def routing(subject: Subject, options: SuiteOptions, say: Callable[[str], None]) -> SuiteResult:
    """See the docstring of the module. options.limit: rows."""
    parts = subject.model_parts("routing")
    try:
        shards, config = parts.text()
        split = shards.valid
        rows = np.random.default_rng(options.seed).permutation(split.rows)[: options.limit or ROWS]
        counts_RLE = _counts(parts.loss_model(), split, rows)
    except CdrmixError as error:
        return SuiteResult("routing", tuple(Measure(name, problem=str(error)) for name in NAMES))
    if counts_RLE is None:
        problem = "the model is dense: it has no routers"
        return SuiteResult("routing", tuple(Measure(name, problem=problem) for name in NAMES))
    say(f"routing: {len(rows)} rows are read")
    routers, capacity, group = _named(parts.config, counts_RLE.shape[1]), CAPACITY, config.train.batch_rows
    if isinstance(parts.config.model, Model):
        capacity = parts.config.model.feed_forward.capacity_factor
    whole = routing_metrics(counts_RLE.sum(0), capacity)
    groups = [counts_RLE[start : start + group].sum(0) for start in range(0, len(rows), group)]
    if len(rows) > group and len(rows) % group:
        groups.pop()  # of fewer rows: its load is less even by chance
    overflow_GL = np.array([routing_metrics(each, capacity)["overflow"] for each in groups])
    entropy = _entropy_intervals(counts_RLE, options.seed)
    layers: list[Measure] = []
    for number, router in enumerate(routers):
        values = overflow_GL[:, number].tolist()
        layers += [
            Measure(f"layer{router} entropy", whole["entropy_normalised"][number], *entropy[number], len(rows)),
            Measure(
                f"layer{router} overflow", float(np.mean(values)), *mean_interval(values, options.seed), len(groups)
            ),
            Measure(f"layer{router} idle", whole["dead_experts"][number], count=counts_RLE.shape[2]),
        ]
    least = min(layers[0::3], key=_value)
    greatest = max(layers[1::3], key=_value)
    experts = counts_RLE.shape[1] * counts_RLE.shape[2]
    measures = (
        Measure(NAMES[0], least.value, least.low, least.high, len(rows)),
        Measure(NAMES[1], greatest.value, greatest.low, greatest.high, len(groups)),
        Measure(NAMES[2], sum(whole["dead_experts"]), count=experts),
        *layers,
    )
    facts: dict[str, Any] = {
        "rows": len(rows),
        "rows_of_held_out_text": split.rows,
        "routes": int(counts_RLE.sum()),
        "capacity_factor": capacity,
        "group_rows": group,
        "experts": counts_RLE.shape[2],
        "routers": routers,
        "max_over_mean": whole["max_over_mean"],
        "entropy_bits": whole["entropy_bits"],
    }
    notes = (
        f"{len(rows):,} of {split.rows:,} rows of held-out text; overflow of a capacity of {capacity:g} times the mean "
        f"load in groups of {group} rows; count is rows, groups and experts",
    )
    return SuiteResult("routing", measures, facts, notes)


def _counts(loss_model: LossModule, split: Split, rows: np.ndarray) -> Tensor | None:
    """int64 [rows, L, E]: routes before capacity of each row; None without routers."""
    device = next(loss_model.parameters()).device
    counts: list[Tensor] = []
    with evaluation_mode(loss_model), torch.no_grad():
        for row in rows.tolist():
            batch = make_batch(split, np.array([row]), step=0, token_count=1.0).to(device)
            inputs = batch.ids_BT, batch.targets_BT, batch.weights_BT, batch.documents
            router = loss_model(*inputs, 1.0, 1.0).router
            if router is None or not len(router.tokens_per_expert_LE):
                return None
            counts.append(router.tokens_per_expert_LE.cpu())
    return torch.stack(counts)


def _named(config: Config, routers: int) -> list[str]:
    """The names of the routers, as in metrics.jsonl of a run."""
    return list(config.model.routers) if isinstance(config.model, Model) else [str(each) for each in range(routers)]


def _entropy_intervals(counts_RLE: Tensor, seed: int) -> list[tuple[float | None, float | None]]:
    """The 95 % percentile interval of each layer's normalised entropy by bootstrap over rows; None for few rows."""
    rows, layers, experts = counts_RLE.shape
    if rows < LEAST_UNITS:
        return [(None, None)] * layers
    draws = np.random.default_rng(seed).multinomial(rows, np.full(rows, 1 / rows), RESAMPLES)
    sums_SLE = torch.from_numpy(draws.astype(np.float64)) @ counts_RLE.double().flatten(1)
    shares = sums_SLE.view(RESAMPLES, layers, experts)
    shares = shares / shares.sum(-1, keepdim=True)
    entropy_SL = -torch.special.xlogy(shares, shares).sum(-1) / max(np.log(experts), 1e-12)
    low, high = np.percentile(entropy_SL.numpy(), (2.5, 97.5), axis=0)
    return list(zip(low.tolist(), high.tolist(), strict=True))


def _value(measure: Measure) -> float:
    assert measure.value is not None
    return measure.value
