"""Processes that each have a range of the blocks train as one process with all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Told = Callable[..., dict[str, float]]
# RWKV-7 at 0, 2, 3 and 5, so that its values go over every border.
MIXERS = (
    *("model.layers=6", "model.mixer_layers={mamba2: [1], routing_mamba: [4]}", "model.attention_fraction=0"),
    "model.mamba={d_state: 8, head_dim: 8, groups: 2}",
)
LAYOUTS = {
    "two pipelines": (4, "train.pipeline_parallel=2", "model.tie_embeddings=true"),
    "two pipelines, a head of its own": (4, "train.pipeline_parallel=2", "model.tie_embeddings=false"),
    "shares of stages": (
        *(8, "train.pipeline_parallel=2", "train.tensor_parallel=2", "model.tie_embeddings=true"),
        *("model.d_model=32", "model.bigrams={rows: 52}"),
    ),
    "slices of rows in stages": (4, "train.pipeline_parallel=2", "train.sequence_parallel=2"),
    "stages of one or two blocks": (4, "train.pipeline_parallel=4", "model.tie_embeddings=true"),
    # No router in the first stage, and no value to carry to the second.
    "dense layers first": (
        *(2, "train.pipeline_parallel=2", "model.layers=3", "model.attention_fraction=0.5"),
        *("model.mixer_layers={mamba2: [], routing_mamba: [], attention: [0]}", "model.feed_forward.dense_layers=[0]"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_engine_trains_stages_as_one_model(told: Told, layout: str) -> None:
    processes, *keys = LAYOUTS[layout]
    sizes = (*MIXERS, *map(str, keys))
    alone = processes == 2 or "train.pipeline_parallel=4" in keys
    stages = "0" if alone else "01"  # ZeRO-1 needs several processes with the same weights
    for case, error in told("sequence_worker.py", "engines", int(processes), *sizes, steps="2", stages=stages).items():
        assert error < 1e-5, case
