"""Fixtures of the tests of phases."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("pydantic", reason="needs pydantic, which is not installed")

from cdrmix.config.schema import Config
from cdrmix.config.schema_training import Train
from cdrmix.reason.phase import phase_config

Training = Callable[[Config, int, float], Config]


@pytest.fixture
def training() -> Training:
    """`training(config, steps, learning_rate)`: the configuration by which `Trial` trains a small model."""

    def settings(config: Config, steps: int, rate: float) -> Config:
        train = Train(
            steps=steps,
            batch_rows=1,
            micro_batch_rows=1,
            learning_rate=rate,
            warmup_steps=min(10, steps),
            weight_decay=0.0,
        )
        return phase_config(config.model_copy(update={"train": train}))

    return settings
