"""Floating-point operations a token: against counts by hand, and against what PyTorch counts of a real step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cdrmix.config.schema import Config
from cdrmix.model.language_model import LanguageModel
from cdrmix.model.loss import LossModel
from cdrmix.model.prediction import Depths
from cdrmix.plan.flops import training_flops_per_token
from cdrmix.plan.foreign import foreign_size
from cdrmix.plan.optimizer import optimizer_size
from cdrmix.plan.plan import pipeline_share

CONFIGS = Path(__file__).parents[2] / "configs"


def test_the_1b_models_operations_are_those_counted_by_hand() -> None:
    flops = training_flops_per_token(Config.from_yaml(CONFIGS / "cdrmix-core-1b.yaml"))
    assert flops.parameters == 6 * flops.active_parameters == pytest.approx(8.70e9, rel=0.001)
    assert flops.attention == 3 * 6 * 2 * 2048 * 2049  # six layers; 2,049 / 2 keys a token, scores and values
    assert flops.rwkv7 == 18 * 28 * 32 * 64 * 64  # 18 layers of 32 heads with states of 64 x 64
    assert flops.mamba2 == flops.recomputed == 0
    assert flops.total == flops.executed == flops.parameters + flops.attention + flops.rwkv7


def test_checkpointing_runs_the_blocks_forward_pass_again() -> None:
    path, adamw = CONFIGS / "cdrmix-hybrid-tiny.yaml", "train.optimizer=adamw"
    plain = training_flops_per_token(Config.from_yaml(path, [adamw]))
    again = training_flops_per_token(Config.from_yaml(path, [adamw, "train.activation_checkpointing=true"]))
    assert again.total == plain.total == plain.executed
    matrices = 2 * (plain.active_parameters - Config.from_yaml(path).cdrmix_model.vocab_size * 128)
    attention = 2 * 128 * 129
    rwkv7 = 9 * 128 * 32
    mamba2 = 2 * (5 * 256 * 64 + 2 * 4 * (256 + 2 * 64))
    assert again.recomputed == matrices + attention + rwkv7 + mamba2


def test_branches_that_skip_tokens_multiply_less() -> None:
    path = CONFIGS / "base" / "tiny.yaml"
    plain, half = (
        training_flops_per_token(Config.from_yaml(path, each)) for each in ([], ["model.depth.capacity=0.5"])
    )
    experts = 4 * 2 * 2 * 128 * 256  # four layers, two experts of two matrices
    assert plain.parameters - half.parameters == 6 * (experts // 2 - 4 * 128)  # less the routers of the depth
    assert (half.attention, half.rwkv7) == (plain.attention, plain.rwkv7)
    both = training_flops_per_token(Config.from_yaml(path, ["model.depth={capacity: 0.5, part: both}"]))
    assert both.attention == 3 * 2 * 128 * 129 // 2  # half of the queries, of 128 tokens
    assert both.rwkv7 == 2 * plain.rwkv7 // 3  # the first of three layers skips nothing


def test_an_embedding_that_is_not_the_head_is_a_look_up() -> None:
    """And so is the table of bigrams."""
    path = CONFIGS / "base" / "tiny.yaml"
    tied = training_flops_per_token(Config.from_yaml(path))
    for more in ("model.tie_embeddings=false", "model.bigrams.rows=61"):
        assert training_flops_per_token(Config.from_yaml(path, [more])) == tied


@pytest.mark.parametrize("overrides", [[], ["model.feed_forward.kind=channel_mix"], ["model.feed_forward.kind=dense"]])
def test_pytorch_counts_as_many_in_the_matrices(overrides: list[str]) -> None:
    """Of a dense attention model every matrix product is PyTorch's own, and its counter sees each."""
    settings = [
        "model.attention_fraction=1.0",
        "model.feed_forward.experts=1",
        "model.feed_forward.top_k=1",
        *overrides,
    ]
    config = Config.from_yaml(CONFIGS / "base" / "tiny.yaml", settings)
    model, rows, length = LanguageModel(config.model), 2, config.data.row_length
    counter = FlopCounterMode(display=False)
    with counter:
        ids = torch.zeros(rows, length, dtype=torch.long)
        model.logits(model(ids).hidden_BTD).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    counted = (counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0)) / (rows * length)
    experts = 0 if config.model.feed_forward.kind != "moe" else 6 * 4 * 2 * 128 * 256  # an operator of ours
    # The vectors' share is no product: norms and mixes, 0.3 % here.
    assert counted + experts == pytest.approx(training_flops_per_token(config).parameters, rel=0.005)


@pytest.mark.parametrize("kind", ["maps", "chain", "sequential"])
def test_pytorch_counts_as_many_in_the_further_depths(kind: str) -> None:
    every, tokens = 2, 3
    section = f"model.prediction={{kind: {kind}, tokens: {tokens}, every: {every}, mixer: attention}}"
    config = Config.from_yaml(CONFIGS / "base" / "tiny.yaml", [section, "data.row_length=64"])
    torch.manual_seed(1)
    model = LossModel(LanguageModel(config.cdrmix_model))
    ids = torch.zeros(2, 64, dtype=torch.long)
    counts = []
    for depths in (None, Depths((0.1,) * (tokens - 1), 0)):
        counter = FlopCounterMode(display=False)
        with counter:
            model(ids, ids, torch.ones(2, 64), None, 128.0, 1.0, depths).total.backward()
        found = counter.get_flop_counts()["Global"]
        counts.append((found[torch.ops.aten.mm] + found.get(torch.ops.aten.addmm, 0)) / 128)
    flops = training_flops_per_token(config)
    heads = 6 * (tokens - 1) * 4096 * 128 // every  # in an operator of ours, as are the products of attention
    scores = 3 * (tokens - 1) * 2 * 128 * 65 if kind == "sequential" else 0
    # Norms are parameters and no products: 2 % here.
    assert counts[1] - counts[0] == pytest.approx(flops.prediction - heads - scores, rel=0.02)
    plain = training_flops_per_token(Config.from_yaml(CONFIGS / "base" / "tiny.yaml", ["data.row_length=64"]))
    assert flops.total == plain.total + flops.prediction
    assert flops.parameters == plain.parameters


def test_muon_takes_less_than_a_twentieth_of_a_released_step() -> None:
    config = Config.from_yaml(CONFIGS / "cdrmix-core-1b.yaml", ["train.optimizer=muon"])
    flops = training_flops_per_token(config)
    assert 0.01 < flops.muon / flops.total < 0.05
    assert flops.executed == flops.total + flops.muon


def test_the_operations_of_muon_are_counted_by_hand() -> None:
    """Of the experts of base/tiny.yaml, with gates and ups apart; and of the projections."""
    overrides = ["train.optimizer=muon", "model.feed_forward.activation=swiglu", "train.optimizer.iterations=3"]
    config = Config.from_yaml(CONFIGS / "base" / "tiny.yaml", overrides)
    square, wide = 4 * 128**3 + 2 * 128**3, 4 * 128**2 * 256 + 2 * 128**3
    blocks, experts, projections = 4, 8, 4
    expected = 3 * blocks * (experts * 3 * wide + projections * square)  # three iterations
    assert optimizer_size(config).operations == expected
    assert training_flops_per_token(config).muon == expected // (8 * 256)


def test_frozen_weights_have_no_gradient(tmp_path: Path) -> None:
    """4 operations of a frozen parameter, 6 of one that is trained; adapters alone are trained."""
    described = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(described | {"num_hidden_layers": 2, "num_attention_heads": 4}))
    path, model = CONFIGS / "cpt-tiny.yaml", f"model.path={tmp_path}"
    plain, adapted = (Config.from_yaml(path, [model, *more]) for more in ([], ["model.lora={rank: 4}"]))
    adapters = foreign_size(adapted).trained
    whole, frozen = training_flops_per_token(plain), training_flops_per_token(adapted)
    assert whole.parameters == 6 * whole.active_parameters
    assert frozen.active_parameters == whole.active_parameters + adapters
    assert frozen.parameters == 4 * whole.active_parameters + 6 * adapters


def test_the_stages_of_a_pipeline_wait_for_it_to_fill_and_to_empty() -> None:
    """Of four micro-batches in two stages each stage waits for one."""
    shares = []
    for stages in (1, 2):
        overrides = [f"train.pipeline_parallel={stages}", "train.micro_batch_rows=2"]
        train = Config.from_yaml(CONFIGS / "base" / "tiny.yaml", overrides).train
        shares.append(pipeline_share(train, stages))
    assert shares == [1, 4 / 5]
