"""Router health of known loads."""

from __future__ import annotations

import torch

from cdrmix.eval.routing import expert_load, routing_metrics


def test_routing_metrics_of_known_loads() -> None:
    counts = torch.tensor([[10, 10, 10, 10], [40, 0, 0, 0], [20, 10, 10, 0]])
    metrics = routing_metrics(counts, 1.25)
    assert metrics["entropy_bits"] == [2.0, 0.0, 1.5]
    assert metrics["entropy_normalised"] == [1.0, 0.0, 0.75]
    assert metrics["max_over_mean"] == [1.0, 4.0, 2.0]
    assert metrics["dead_experts"] == [0.0, 3.0, 1.0]
    # Capacity ceil(1.25 * 40 / 4) = 13: 27 of 40 rows over in the second layer, 7 in the third.
    assert metrics["overflow"] == [0.0, 27 / 40, 7 / 40]
    assert metrics["dropped"] == [0.0, 0.0, 0.0]
    computed = torch.tensor([[10, 10, 10, 10], [12, 0, 0, 0], [13, 10, 10, 0]])
    assert routing_metrics(counts, 1.25, computed)["dropped"] == [0.0, 28 / 40, 7 / 40]
    assert expert_load(counts)[2] == [0.5, 0.25, 0.25, 0.0]
