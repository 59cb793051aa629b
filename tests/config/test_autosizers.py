"""Sizes and widths to parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdrmix.config.autosizers import core_param_autosizer, low_ranks, reasoning_param_autosizer
from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError

TRAIN = "train: {steps: 5, batch_rows: 1, micro_batch_rows: 1, learning_rate: 1}\n"


@pytest.mark.parametrize(
    ("width", "decay", "value", "gate"),
    [  # the released RWKV-7 models, 0.1 B to 7.2 B
        (768, 64, 32, 128),
        (1024, 64, 32, 128),
        (2048, 96, 64, 256),
        (2560, 96, 64, 320),
        (4096, 128, 96, 480),
        # the sizes that were never released
        (3072, 96, 64, 384),
        (6144, 160, 96, 736),
        (12288, 224, 160, 1472),
        # narrow ones: a quarter of the width at most
        (256, 32, 32, 64),
        (128, 32, 32, 32),
        (32, 8, 8, 8),
        (1, 1, 1, 1),
    ],
)
def test_low_ranks(width: int, decay: int, value: int, gate: int) -> None:
    expected = {"decay_rank": decay, "iclr_rank": decay, "value_rank": value, "gate_rank": gate}
    assert low_ranks(width) == expected


@given(st.integers(1, 100_000))
def test_low_ranks_grow_with_the_width(width: int) -> None:
    narrow, wide = low_ranks(width), low_ranks(width + 1)
    assert all(0 < narrow[key] <= wide[key] for key in narrow)
    assert max(narrow.values()) <= max(1, width // 4)


def test_widths_follow_without_a_size(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        TRAIN + "model: {d_model: 1024, layers: 2, attention: {heads: 8}, feed_forward: {hidden: 64}, "
        "rwkv: {gate_rank: 7}}\n"
    )
    model = Config.from_yaml(path).model
    assert model.attention.kv_heads == 8
    assert (model.rwkv.decay_rank, model.rwkv.value_rank, model.rwkv.gate_rank) == (64, 32, 7)
    assert Config.from_yaml(path, ["model.attention.kv_heads=2"]).model.attention.kv_heads == 2


def test_explicit_keys_win_over_the_size(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(TRAIN + "model: {size: 40b}\nreasoning: {}\n")
    overrides = ["model.d_model=1024", "model.feed_forward.hidden=10", "train.gradient_clip=2", "model.layers=3",
                 "model.attention.heads=8", "reasoning.rl.horizon=9", "reasoning.plastic_lora.rank=1"]  # fmt: skip
    config = Config.from_yaml(path, overrides)
    assert (config.model.d_model, config.model.layers, config.model.feed_forward.hidden) == (1024, 3, 10)
    assert (config.train.gradient_clip, config.model.init_std_scale) == (2.0, 0.9)
    assert (config.model.attention.heads, config.model.attention.kv_heads) == (8, 8)
    assert config.model.rwkv.gate_rank == 128  # of the width that was written, not of 40b's
    assert config.reasoning is not None
    assert (config.reasoning.rl.horizon, config.reasoning.plastic_lora.rank) == (9, 1)
    assert (config.reasoning.controller.step_budget, config.reasoning.memory.dim) == (128, 768)


def test_a_size_of_the_ladder_is_a_whole_architecture(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(TRAIN + "model: {size: dense-500m}\n")
    model = Config.from_yaml(path).cdrmix_model
    assert {*model.mixers} == {"attention"}
    assert (model.attention.heads, model.attention.kv_heads, model.layers) == (16, 4, 24)
    assert (model.feed_forward.kind, model.feed_forward.activation) == ("dense", "swiglu")
    assert (model.norm, model.norm_eps, model.embedding_norm) == ("rmsnorm", 1e-6, False)
    own = Config.from_yaml(path, ["model.attention.heads=8", "model.norm=layernorm"]).cdrmix_model
    assert (own.attention.heads, own.attention.kv_heads, own.norm) == (8, 8, "layernorm")
    assert Config.from_yaml(path, ["model.attention.kv_heads=2"]).cdrmix_model.attention.kv_heads == 2
    experts = Config.from_yaml(path, ["model.feed_forward.kind=moe"]).cdrmix_model.feed_forward
    assert (experts.activation, experts.hidden) == ("relu2", 5248)
    with pytest.raises(ConfigError, match=r"or set model.size \(1b, 4b, 40b, 200b\)"):
        Config.from_yaml(path, ["reasoning={}"])


broken = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.just("1b")),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["size", "d_model", "attention", "heads"]), inner),
)


@given(st.dictionaries(st.sampled_from(["model", "train", "reasoning"]), broken))
def test_malformed_data_are_left_to_the_schema(data: dict[str, object]) -> None:
    assert isinstance(core_param_autosizer(data), dict)
    assert isinstance(reasoning_param_autosizer(data), dict)


def test_a_core_run_gets_no_reasoning() -> None:
    assert reasoning_param_autosizer({"model": {"size": "1b"}}) == {}
    assert reasoning_param_autosizer({"model": {"size": "1b"}, "reasoning": None}) == {}
    assert reasoning_param_autosizer({"model": {}, "reasoning": {}}) == {}
