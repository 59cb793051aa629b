"""The records of optimizer steps, which metrics.jsonl, the trackers, the console and the report read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from cdrmix.config.schema_huggingface import HuggingFaceModel
from cdrmix.config.schema_model import Model
from cdrmix.eval.routing import CAPACITY, expert_load, routing_metrics


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step of stage A. Losses are in nats.

    loss: the optimised loss. next_token_loss: nats per token with a target, over the global batch. tokens: with a
    target, since the start of the run. seconds: training time since then. routers: names as in `Model.routers`.
    router: measure -> one value for each router. load: for each router the fraction of routes of each expert, 1 / E
    when balanced. depth: of the branches that skip tokens, the share of tokens that each kept, with names as in
    `Model.skipping`. valid_*: on steps that were validated. valid_domains: domain -> bits per byte, if there are
    several. parts, valid_parts: part of the loss -> nats per token, with data.objectives.weights; held-out chains of
    thought and held-out documents in the order of fill in the middle are parts, and bits per byte are of the text as
    it is. preferences: of pairs, measure -> mean; then loss and next_token_loss are of a pair. prediction_losses: of
    multi-token prediction, depth -> nats per token; depth 1 is next_token_loss.
    """

    step: int
    epoch: float
    loss: float
    next_token_loss: float
    load_balance: float
    z_loss: float
    learning_rate: float
    gradient_norm: float
    tokens: int
    tokens_per_second: float
    seconds: float
    memory_gib: float
    routers: list[str] = field(default_factory=list)
    router: dict[str, list[float]] = field(default_factory=dict)
    load: list[list[float]] = field(default_factory=list)
    depth: dict[str, float] = field(default_factory=dict)
    valid_bits_per_byte: float | None = None
    valid_loss: float | None = None
    valid_domains: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    valid_parts: dict[str, float] = field(default_factory=dict)
    preferences: dict[str, float] = field(default_factory=dict)
    valid_preferences: dict[str, float] = field(default_factory=dict)
    prediction_losses: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PhaseRecord:
    """One optimizer step of a phase of stage B. `step` continues the count of stage A, `phase_step` counts from 1.

    measures: means and rates of the step, by name.
    """

    step: int
    phase: str
    phase_step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    seconds: float
    memory_gib: float
    measures: dict[str, float]


Record = StepRecord | PhaseRecord


class RoutingCounts(NamedTuple):
    """Of a step's global batch, by router and expert [L, E]: tokens before capacity, tokens after it."""

    tokens_per_expert_LE: Tensor
    counts_LE: Tensor

    def measures(self, model: Model | HuggingFaceModel) -> dict[str, Any]:
        """The routing fields of a StepRecord; {} without a mixture of experts."""
        if not len(self.tokens_per_expert_LE):
            return {}
        routers, capacity = [str(number) for number in range(len(self.tokens_per_expert_LE))], CAPACITY
        if isinstance(model, Model):
            routers, capacity = list(model.routers), model.feed_forward.capacity_factor
        return {
            "routers": routers,
            "router": routing_metrics(self.tokens_per_expert_LE, capacity, self.counts_LE),
            "load": expert_load(self.tokens_per_expert_LE),
        }


class DepthTotals(NamedTuple):
    """Of a step's global batch, by branch that skips tokens [G], float64: the share of the tokens kept; means over the
    micro-batches of the threshold and of the lowest score (`model.depth.Gated`)."""

    share_G: Tensor
    threshold_G: Tensor
    lowest_G: Tensor

    @classmethod
    def of(cls, sums_5G: Tensor) -> DepthTotals:
        """From the sums of kept tokens, tokens, thresholds, lowest scores and micro-batches."""
        kept_G, tokens_G, threshold_G, lowest_G, micro_batches_G = sums_5G
        return cls(kept_G / tokens_G, threshold_G / micro_batches_G, lowest_G / micro_batches_G)


def scalars(record: Record) -> dict[str, float]:
    """A record as flat numbers, such as `router/entropy_bits/layer3`, without what is None."""
    flat: dict[str, float] = {}
    fields = dataclasses.asdict(record)
    routers = router_names(fields) if "routers" in fields else []
    for name, value in fields.items():
        if isinstance(value, dict):
            for measure, numbers in value.items():
                if isinstance(numbers, int | float):
                    flat[f"{fields.get('phase', name)}/{measure}"] = numbers
                    continue
                flat |= {f"{name}/{measure}/layer{router}": each for router, each in zip(routers, numbers, strict=True)}
        elif name == "load":
            for router, shares in zip(routers, value, strict=False):
                flat |= {f"{name}/layer{router}/expert{expert}": share for expert, share in enumerate(shares)}
        elif value is not None and name not in ("step", "routers", "phase"):
            flat[name] = value
    return flat


def router_names(record: Mapping[str, Any]) -> list[str]:
    """The names of the routers of a record; their numbers, if an older metrics.jsonl has no names."""
    counted = [record.get("load", []), *record.get("router", {}).values()]
    return record.get("routers") or [str(number) for number in range(max(map(len, counted)))]
