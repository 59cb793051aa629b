"""Processes that each have a range of the blocks train as one process with all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.plan.memory import memory_of
from cdrmix.training.build import build_loss_model
from cdrmix.training.launch import check_processes

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
    "experts in stages": (
        *(4, "train.pipeline_parallel=2", "train.expert_parallel=2"),
        *("model.feed_forward.dense_layers=[3, 4, 5]", "model.mixer_layers={routing_mamba: []}"),
    ),
    # A stage that is neither the first nor the last.
    "stages of one or two blocks": (
        *(3, "train.pipeline_parallel=3", "model.tie_embeddings=true", "model.layers=4"),
        "model.mixer_layers={mamba2: [1], routing_mamba: [2]}",
    ),
    # No router in the first stage, and no value to carry to the second.
    "dense layers first": (
        *(2, "train.pipeline_parallel=2", "model.layers=3", "model.attention_fraction=0.5"),
        *("model.mixer_layers={mamba2: [], routing_mamba: [], attention: [0]}", "model.feed_forward.dense_layers=[0]"),
    ),
}


QUICK = ("stages of one or two blocks", "dense layers first")
SLOW = "experts in stages"


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow if name == SLOW else pytest.mark.long)
        for name in LAYOUTS
    ],
)
def test_the_engine_trains_stages_as_one_model(told: Told, layout: str) -> None:
    processes, *keys = LAYOUTS[layout]
    sizes = (*MIXERS, *map(str, keys))
    alone = layout in QUICK
    stages = "0" if alone else "01"  # ZeRO-1 needs several processes with the same weights
    for case, error in told("sequence_worker.py", "engines", int(processes), *sizes, steps="2", stages=stages).items():
        assert error < 1e-5, case


@pytest.mark.slow
def test_a_gradient_of_one_stage_that_is_not_finite_ends_the_update_of_all(told: Told) -> None:
    """The stages would otherwise have weights of different steps."""
    found = told("pipeline_worker.py", "poisoned", 4, *MIXERS, "train.pipeline_parallel=2")
    for case, number in found.items():
        assert (number > 0) == ("no stage" in case), case
    assert {number for case, number in found.items() if case == "ZeRO 1, no stage: applied"} == {4}


@pytest.mark.long
def test_the_copy_of_a_tied_table_stays_equal(told: Told) -> None:
    """Three processes a stage, whose sums in 16 bits depend on the order."""
    rows = ("train.batch_rows=6", "train.micro_batch_rows=1")
    assert told("pipeline_worker.py", "tied", 6, *rows, "train.pipeline_parallel=2") == {"digests": 1}


def test_what_has_no_stages_is_refused(refuses: Callable[..., None], make_config: Callable[..., Config]) -> None:
    refuses(
        (r"at most model\.layers=2: each stage needs a block", "train.pipeline_parallel=3"),
        (r"1 with train\.zero_stage=3", "train.pipeline_parallel=2", "train.zero_stage=3"),
        (r"1 with train\.optimizer\.kind muon", "train.pipeline_parallel=2", "train.optimizer=muon"),
        (r"1 with model\.prediction", "train.pipeline_parallel=2", "model.prediction={tokens: 2}"),
        (r"1 with model\.depth", "train.pipeline_parallel=2", "model.depth={capacity: 0.5}"),
        (r"1 with count of a plugin", "train.pipeline_parallel=2", "model.feed_forward.kind=count"),
        (r"1 with train\.compile", "train.pipeline_parallel=2", "train.compile=true"),
    )
    config = make_config("train.pipeline_parallel=2")
    check_processes(config, 2)
    with pytest.raises(ConfigError, match=r"train\.pipeline_parallel: must divide the number of processes"):
        check_processes(config, 3)
    with pytest.raises(ConfigError, match=r"train\.expert_parallel: must divide the number of processes of a stage, 2"):
        check_processes(
            make_config("train.pipeline_parallel=2", "train.expert_parallel=4", "train.micro_batch_rows=2"), 4
        )
    with pytest.raises(ConfigError, match=r"2 processes and train\.pipeline_parallel=2"):
        check_processes(make_config("train.pipeline_parallel=2", "train.zero_stage=1"), 2)
    with pytest.raises(ConfigError, match=r"needs a multiple of as many processes"):
        build_loss_model(config)


def test_a_plan_has_the_state_of_a_stage(make_config: Callable[..., Config]) -> None:
    """Of a model whose blocks have nearly all parameters."""

    def planned(stages: int, processes: int, *more: str) -> dict[str, int]:
        sizes = ("model.d_model=32", "model.rwkv.head_size=32", "model.layers=8", "model.feed_forward.hidden=1024")
        config = make_config(
            *(*sizes, "train.micro_batch_rows=1", "train.zero_stage=auto", *more),
            f"train.pipeline_parallel={stages}",
        )
        return {each.name: each.bytes for each in memory_of(config, "cuda", processes).components}

    one, two, four, copied = planned(1, 1), planned(2, 2), planned(4, 4), planned(2, 4)
    for name in ("weights", "optimizer", "gradients"):
        assert 0.5 * one[name] < two[name] < 0.52 * one[name]
        assert 0.25 * one[name] < four[name] < 0.27 * one[name]
    assert copied["weights"] == two["weights"]
    assert copied["optimizer"] == pytest.approx(two["optimizer"] / 2, rel=1e-3)  # by ZeRO-1 over the two copies
    # The first of four stages keeps four of the eight micro-batches, of a quarter of the blocks.
    assert 0.9 * one["activations"] < four["activations"] < 1.3 * one["activations"]
    shared_out = planned(2, 4, "train.expert_parallel=2")
    assert 0.5 * two["weights"] < shared_out["weights"] < 0.55 * two["weights"]
    assert 0.5 * two["gradients"] < shared_out["gradients"] < 0.55 * two["gradients"]
