"""What one optimizer step reports: the records that metrics.jsonl, the trackers, the console and the report read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from cdrmix.config.schema import Model
from cdrmix.eval.routing import expert_load, routing_metrics


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Losses are in nats; `routers` are named as in `Model.routers`; `router` maps a measure to one
    value of each; `load` has for each every expert's share of the routes, 1 / E where it is even.

    `loss` is what was optimised; `next_token_loss` is nats per valid token of the global batch;
    `tokens` counts valid tokens since the start of the run, `seconds` training time since then.
    The validation figures are there on the steps that evaluated.
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
    valid_bits_per_byte: float | None = None
    valid_loss: float | None = None


@dataclass(frozen=True)
class PhaseRecord:
    """One optimizer step of a phase of stage B. `step` goes on counting where stage A ended, `phase_step` from 1.

    measures: what the phase shows of its step, by name: means and rates.
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
    """Of a step's global batch, by router and expert [L, E]: routes that wanted it, rows that it computed."""

    demand_LE: Tensor
    counts_LE: Tensor

    def measures(self, model: Model) -> dict[str, Any]:
        """The routing fields of a StepRecord; {} without a mixture of experts."""
        if not len(self.demand_LE):
            return {}
        return {
            "routers": list(model.routers),
            "router": routing_metrics(self.demand_LE, model.feed_forward.capacity_factor, self.counts_LE),
            "load": expert_load(self.demand_LE),
        }


def scalars(record: Record) -> dict[str, float]:
    """A record as flat numbers: `router/entropy_bits/layer3`, and so on; what is None is left out."""
    flat: dict[str, float] = {}
    fields = dataclasses.asdict(record)
    routers = router_names(fields) if "routers" in fields else []
    for name, value in fields.items():
        if isinstance(value, dict):
            for measure, numbers in value.items():
                if isinstance(numbers, int | float):
                    flat[f"{fields['phase']}/{measure}"] = numbers
                    continue
                flat |= {f"{name}/{measure}/layer{router}": each for router, each in zip(routers, numbers, strict=True)}
        elif name == "load":
            for router, shares in zip(routers, value, strict=False):
                flat |= {f"{name}/layer{router}/expert{expert}": share for expert, share in enumerate(shares)}
        elif value is not None and name not in ("step", "routers", "phase"):
            flat[name] = value
    return flat


def router_names(record: Mapping[str, Any]) -> list[str]:
    """The names of the routers of a record; of one that has none of them (metrics.jsonl of before), their numbers."""
    counted = [record.get("load", []), *record.get("router", {}).values()]
    return record.get("routers") or [str(number) for number in range(max(map(len, counted)))]
