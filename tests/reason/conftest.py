"""What tests of phases share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("pydantic", reason="needs pydantic, which is not installed")

from cdrmix.config.schema import Train

Training = Callable[[int, float], Train]


@pytest.fixture
def training() -> Training:
    """`training(steps, learning_rate)`: how a small model is trained by `run_phase`."""
    return lambda steps, rate: Train(
        steps=steps, batch_rows=1, micro_batch_rows=1, learning_rate=rate, warmup_steps=min(10, steps), weight_decay=0.0
    )
