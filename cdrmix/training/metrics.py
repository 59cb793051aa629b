"""The routing and the depth of a step as a record has them, and a record as the scalars that trackers take."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor

from cdrmix.config.schema_huggingface import HuggingFaceModel
from cdrmix.config.schema_model import Model
from cdrmix.eval.routing import CAPACITY, expert_load, routing_metrics
from cdrmix.records import Record, StepRecord


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
    routers = record.router_names if isinstance(record, StepRecord) else []
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
