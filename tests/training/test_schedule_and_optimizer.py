"""The learning-rate schedule, the optimizer's groups, the fp16 loss scale and the weight average."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cdrmix.config.schema_optimizer import Schedule
from cdrmix.config.schema_training import Train
from cdrmix.errors import ConfigError
from cdrmix.inference.checkpoints import newest_whole_checkpoint, read_weights
from cdrmix.model.layers import parameter_kinds
from cdrmix.run_folder import RunFolder
from cdrmix.runtime import seed_everything
from cdrmix.training.build import build_loss_model
from cdrmix.training.optim import LossScale, WeightAverage, make_optimizer, parameter_groups
from cdrmix.training.schedule import group_rates, learning_rate
from cdrmix.training.stage_a import train


def schedule(steps: int, warmup: int, ratio: float) -> Train:
    return Train(
        steps=steps,
        warmup_steps=warmup,
        learning_rate=2.0,
        final_learning_rate_ratio=ratio,
        batch_rows=1,
        micro_batch_rows=1,
    )


@given(st.integers(1, 300), st.floats(0, 1), st.floats(0, 1))
def test_rate_rises_to_the_peak_then_falls_to_the_ratio(steps: int, warm: float, ratio: float) -> None:
    warmup = int(warm * (steps - 1))
    train = schedule(steps, warmup, ratio)
    rates = [learning_rate(train, step) for step in range(steps)]
    rising, falling = rates[:warmup], rates[warmup:]
    assert all(low < high for low, high in itertools.pairwise(rising))
    assert not rising or rising[-1] == 2.0
    # Two roundings of 2**-53 each can make neighbours on a flat cosine swap by a few units in the last place.
    assert all(high >= low - 1e-15 for high, low in itertools.pairwise(falling))
    assert rates[-1] == pytest.approx(2.0 * ratio, rel=1e-12, abs=1e-15)
    assert all(2.0 * min(ratio, 1 / max(warmup, 1)) - 1e-12 <= rate <= 2.0 for rate in rates)


def test_first_step_already_learns() -> None:
    assert learning_rate(schedule(10, 4, 0.1), 0) == pytest.approx(0.5)
    assert learning_rate(schedule(10, 0, 0.1), 0) > 1.9


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ("{embedding: 3}", "train.groups.embedding: found 3"),
        ("{embedding: null}", "train.groups.embedding: found null"),
        ("{head: {schedule: [1]}}", "train.groups.head.schedule: found a list of 1"),
        ("{head: {schedule: {decay: 0.5}}}", "train.groups.head.schedule.decay: found 0.5"),
        ("{heads: {rate: 2.0}}", "did you mean train.groups.head"),
    ],
)
def test_groups_that_are_refused(make_config, groups: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        make_config(f"train.groups={groups}")


def test_every_parameter_is_in_one_group_and_only_matrices_decay(make_config) -> None:
    config = make_config("train.weight_decay=0.3")
    model = build_loss_model(config)
    groups = parameter_groups(model, config.train)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    found = {id(parameter): group for group in groups for parameter in group["params"]}
    kinds = parameter_kinds(model)
    for name, parameter in model.named_parameters():
        kind = kinds[name]
        assert found[id(parameter)]["weight_decay"] == (0.3 if kind in ("projection", "expert") else 0.0), name
        assert found[id(parameter)]["multiplier"] == (2.0 if kind == "decay_bias" else 1.0), name
    assert set(kinds.values()) == {*("projection", "expert", "embedding", "low_rank", "router", "decay_bias", "vector")}


FOREIGN = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
}


@pytest.mark.parametrize(
    ("kind", "extra", "decayed"),
    [
        ("llama", {}, r"(self_attn|mlp)\.\w+_proj\.weight"),
        ("llama", {"tie_word_embeddings": True}, r"(self_attn|mlp)\.\w+_proj\.weight"),
        ("qwen3_moe", {}, r"self_attn\.[qkvo]_proj\.weight|mlp\.experts\.(gate_up|down)_proj"),
        ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2}, r"(attn|mlp)\.c_\w+\.weight"),
        ("gpt_oss", {}, r"self_attn\.[qkvo]_proj\.weight|mlp\.experts\.(gate_up|down)_proj"),
        ("mamba", {}, r"mixer\.\w+_proj\.weight"),
    ],
)
def test_of_models_of_transformers_only_matrices_decay(make_config, kind: str, extra: dict, decayed: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers, which is not installed")
    described = transformers.AutoConfig.for_model(kind, **FOREIGN | extra)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(described)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, make_config("train.weight_decay=0.3").train)
    found = {names[parameter] for group in groups if group["weight_decay"] for parameter in group["params"]}
    assert found == {name for name in names.values() if re.search(rf"\.({decayed})$", name)}
    assert len(found) > 3
    # Partitioned by ZeRO-3 while it is made, each parameter has the shape (0,).
    for parameter in names:
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0, device="meta")
    groups = parameter_groups(model, make_config("train.weight_decay=0.3").train)
    assert found == {names[parameter] for group in groups if group["weight_decay"] for parameter in group["params"]}


def test_fused_adamw_is_the_published_update(make_config) -> None:
    train = make_config("train.weight_decay=0.3").train
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer = make_optimizer([{"params": [weight], "weight_decay": 0.3, "multiplier": 1.0}], train)
    expected, first, second = weight.detach().clone(), torch.zeros(3).double(), torch.zeros(3).double()
    beta1, beta2 = train.betas
    for step in range(1, 4):
        gradient = torch.tensor([0.1 * step, -0.2, 0.0], dtype=torch.float64)
        weight.grad = gradient.clone()
        optimizer.step()
        first, second = beta1 * first + (1 - beta1) * gradient, beta2 * second + (1 - beta2) * gradient**2
        expected *= 1 - train.learning_rate * 0.3
        unbiased = second / (1 - beta2**step)
        expected -= train.learning_rate * first / (1 - beta1**step) / (unbiased.sqrt() + train.epsilon)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-14, atol=1e-14)


def test_loss_scale_halves_on_overflow_and_doubles_after_calm() -> None:
    scale = LossScale(True, initial=8.0, interval=2)
    scale.update(False)
    assert scale.value == 4.0
    scale.update(True)
    scale.update(True)
    assert scale.value == 8.0
    other = LossScale(True)
    other.load(scale.state())
    assert other.state() == scale.state()
    for _ in range(20):
        scale.update(False)
    assert scale.value == 1.0
    off = LossScale(False)
    off.update(False)
    assert off.value == 1.0


def test_weight_average_is_the_exponential_one() -> None:
    weight = torch.tensor([0.0, 4.0])
    average = WeightAverage([weight], decay=0.75)
    weight.copy_(torch.tensor([1.0, 8.0]))
    average.update([weight])
    weight.copy_(torch.tensor([2.0, 8.0]))
    average.update([weight])
    assert average.tensors[0].tolist() == [0.25 * 0.75 + 0.5, (4 + 0.25 * 4) * 0.75 + 2.0]


@given(st.integers(10, 200), st.floats(0, 0.5), st.floats(0.05, 1.0), st.sampled_from(["linear", "sqrt"]))
def test_wsd_is_constant_until_its_decay(steps: int, warm: float, decay: float, shape: str) -> None:
    warmup = int(warm * steps)
    own = Schedule(kind="wsd", decay=decay, shape=shape)
    train = schedule(steps, warmup, 0.1).model_copy(update={"schedule": own})
    rates = [learning_rate(train, step) for step in range(steps)]
    begin = max(warmup, steps - round(decay * steps))
    assert rates[warmup:begin] == [2.0] * (begin - warmup)
    assert all(high > low for high, low in itertools.pairwise(rates[begin:]))
    if begin < steps:
        assert rates[-1] == pytest.approx(0.2, rel=1e-12)
        share = 1 / (steps - begin)  # of the decay, after its first step
        fallen = share if shape == "linear" else share**0.5
        assert rates[begin] == pytest.approx(2.0 - 1.8 * fallen, rel=1e-12)


def test_linear_and_constant_schedules() -> None:
    for kind, rates in {"linear": [1.0, 2.0, 1.5, 1.0, 0.5, 0.0], "constant": [1.0, *[2.0] * 5]}.items():
        train = schedule(6, 2, 0.0).model_copy(update={"schedule": Schedule(kind=kind)})
        assert [learning_rate(train, step) for step in range(6)] == pytest.approx(rates, abs=1e-15), kind


def test_groups_have_rates_decay_and_schedules_of_their_own(make_config) -> None:
    config = make_config(
        "model.tie_embeddings=false",
        "train.weight_decay=0.3",
        "train.groups={embedding: {rate: 3.0, schedule: {kind: linear, final_ratio: 0.5}}, matrix: {rate: 0.5}, "
        "expert: {weight_decay: 0.7}, vector: {weight_decay: 0.01}, router: {rate: 2.0}}",
    )
    model = build_loss_model(config)
    groups, kinds = parameter_groups(model, config.train), parameter_kinds(model)
    found = {id(parameter): group for group in groups for parameter in group["params"]}
    expected = {
        "embedding": (3.0, 0.0, "embedding"),
        "head": (1.0, 0.0, None),
        "projection": (0.5, 0.3, None),
        "expert": (1.0, 0.7, None),
        "low_rank": (1.0, 0.01, None),
        "router": (2.0, 0.0, None),
        "decay_bias": (2.0, 0.0, None),
        "vector": (1.0, 0.01, None),
    }
    for name, parameter in model.named_parameters():
        group = found[id(parameter)]
        assert (group["multiplier"], group["weight_decay"], group["schedule"]) == expected[kinds[name]], name
    last = config.train.steps - 1
    assert group_rates(config.train, last) == {"embedding": pytest.approx(0.5 * config.train.learning_rate)}


@pytest.mark.usefixtures("own_settings")
def test_groups_and_schedules_reach_the_updates(make_config, shards) -> None:
    """After one step of a run AdamW has moved each element by about its learning rate: g / |g| of the first step."""
    moved = {}
    for groups in ("{}", "{embedding: {rate: 3.0}}", "{embedding: {rate: 3.0, schedule: constant}}"):
        run = ("train.steps=1", "train.warmup_steps=0", "train.schedule=linear", "train.epsilon=1e-12")
        config = make_config(*run, "train.final_learning_rate_ratio=0.1", f"train.groups={groups}")
        folder = RunFolder.create(config)
        seed_everything(config.run.seed)
        start = build_loss_model(config).language_model.embedding.weight.detach().clone()
        train(config, folder, shards, console=False)
        newest = newest_whole_checkpoint(folder.checkpoints)
        assert newest is not None
        moved[groups] = (read_weights(newest)["embedding.weight"] - start).abs().max().item()
    one, three, constant = moved.values()
    rate = make_config().train.learning_rate
    # The largest weight is below 0.1, and rounded by 2^-28.
    assert (one, three, constant) == pytest.approx((0.1 * rate, 0.3 * rate, 3 * rate), rel=1e-3)
