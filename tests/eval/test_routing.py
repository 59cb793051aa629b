"""Router health of known loads."""

from __future__ import annotations

import torch

from cdrmix.eval.routing import routing_metrics


def test_routing_metrics_of_known_loads() -> None:
    counts = torch.tensor([[10, 10, 10, 10], [40, 0, 0, 0], [20, 10, 10, 0]])
    metrics = routing_metrics(counts, 1.25)
    assert metrics["entropy_bits"] == [2.0, 0.0, 1.5]
    assert metrics["entropy_normalised"] == [1.0, 0.0, 0.75]
    assert metrics["max_over_mean"] == [1.0, 4.0, 2.0]
    assert metrics["dead_experts"] == [0.0, 3.0, 1.0]
    # Capacity ceil(1.25 * 40 / 4) = 13: 27 of 40 rows over in the second layer, 7 in the third.
    assert metrics["overflow"] == [0.0, 27 / 40, 7 / 40]
