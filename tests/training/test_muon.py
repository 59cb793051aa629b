"""Muon: the iteration against the singular value decomposition, its updates, and several processes against one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cdrmix.config.schema import Config
from cdrmix.config.schema_optimizer import Optimizer
from cdrmix.errors import ConfigError
from cdrmix.kernels.common.products import multiply_on_all_threads, multiply_on_one_thread, set_num_threads
from cdrmix.training import muon
from cdrmix.training.build import build_loss_model
from cdrmix.training.muon import SAFETY, polar_factor, polynomials
from cdrmix.training.optim import make_optimizer, parameter_groups

MakeConfig = Callable[..., Config]
MUON = Optimizer(kind="muon")
# A rounding of 2^-24 of the matrix grows by the iteration's largest slope, below 8.3 * 4.1 * 4 * 3.4 * 2.4 = 1100, and
# each product of 5 iterations adds sums of up to 64 terms with about sqrt(64) roundings: 2^-24 * 1100 * 8 = 5e-4.
ROUNDING = 1e-3


def orthogonalised(x: Tensor) -> Tensor:
    """The iteration's result in float64, by its polynomials of the singular values of x, [R, C]."""
    left, values, right = torch.linalg.svd(x.double(), full_matrices=False)
    if not values.any():
        return torch.zeros_like(x, dtype=torch.float64)
    values = values / (SAFETY * values.pow(8).sum() ** (1 / 8))
    for a, b, c in polynomials(MUON):
        values = a * values + b * values**3 + c * values**5
    return left * values @ right


def of_spectrum(values: Tensor, columns: int) -> Tensor:
    """A random [R, C] with these singular values."""
    rows = len(values)
    left, _ = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(columns, rows, dtype=torch.float64))
    return (left * values @ right.mT).float()


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (48, 64), (128, 256)])
@pytest.mark.parametrize("condition", [1, 10, 100, 1000])
@pytest.mark.parametrize(("spectrum", "iterations"), [("one large", 5), ("even", 6), ("powers", 6), ("one small", 7)])
def test_singular_values_become_about_one(
    spectrum: str, iterations: int, condition: float, rows: int, columns: int
) -> None:
    """Five iterations suffice down to 1/1000 of the divisor, which is up to 128^(1/8) = 1.8 times the largest singular
    value. Where many are nearly as large, a condition of 1000 takes six or seven."""
    torch.manual_seed(0)
    values = {
        "one large": torch.cat([torch.ones(1), torch.full((rows - 1,), SAFETY * 1.001 / condition)]),
        "even": torch.linspace(1, 1 / condition, rows),
        "one small": torch.cat([torch.ones(rows - 1), torch.tensor([1 / condition])]),
        "powers": torch.logspace(0, -torch.tensor(float(condition)).log10().item(), rows),
    }[spectrum]
    x = of_spectrum(values.double(), columns)
    chosen = polynomials(MUON.model_copy(update={"iterations": iterations}))
    found = torch.linalg.svdvals(polar_factor(x[None], chosen, torch.float32)[0].double())
    assert found.min() > 0.85
    assert found.max() < 1.15


def stepped(gradients: dict[str, Tensor], make_config: MakeConfig, *overrides: str) -> dict[str, tuple[Tensor, Tensor]]:
    """One step of the configured optimizer on the tiny model, with gradients of zero but these: weights before, after.

    The model has one block of each kind whose matrices hold several maps.
    """
    fused = ("model.mixer_layers={mamba2: [0], routing_mamba: [1]}", "model.mamba={d_state: 8, head_dim: 8}")
    config = make_config("train.optimizer=muon", "model.feed_forward.activation=swiglu", *fused, *overrides)
    torch.manual_seed(2)
    model = build_loss_model(config)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        parameter.grad = gradients.get(name, torch.zeros_like(parameter))
    optimizer = make_optimizer(parameter_groups(model, config.train), config.train)
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * group["multiplier"]
    before = {name: parameters[name].detach().clone() for name in gradients}
    optimizer.step()
    return {name: (before[name], parameters[name].detach()) for name in gradients}


PREFIX = "language_model.blocks."
INNER, SELECTING = 32, 8  # of the tiny model's Mamba-2: 2 * 16 channels, one group of B and C


@pytest.mark.parametrize(
    ("name", "maps"),
    [
        ("0.feed_forward.w_up", lambda x: [x[..., 0::2], x[..., 1::2]]),  # gates and ups alternate
        ("1.mixer.w_up", lambda x: [x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]]),
        ("0.mixer.input.weight", None),
        ("0.mixer.output.weight", lambda x: [x]),
        ("0.feed_forward.w_down", lambda x: [x]),
    ],
)
def test_each_map_of_a_matrix_is_orthogonalised_alone(make_config: MakeConfig, name: str, maps: Any) -> None:
    config = make_config()
    inner, selecting = 2 * config.model.d_model, 8
    if maps is None:

        def maps(x: Tensor) -> list[Tensor]:
            return list(x.split([inner, inner, selecting, selecting, x.shape[0] - 2 * inner - 2 * selecting]))

    torch.manual_seed(1)
    whole = dict(
        build_loss_model(
            make_config(
                "model.feed_forward.activation=swiglu",
                "model.mixer_layers={mamba2: [0], routing_mamba: [1]}",
                "model.mamba={d_state: 8, head_dim: 8}",
            )
        ).named_parameters()
    )[PREFIX + name]
    gradient = torch.randn(whole.shape)
    maps(gradient)[0].mul_(100)  # a planted map that would drown the others in a common norm
    before, after = stepped({PREFIX + name: gradient}, make_config, "train.weight_decay=0.0")[PREFIX + name]
    for moved, own in zip(maps(before - after), maps(gradient), strict=True):
        flat_moved, flat_own = moved.reshape(-1, *own.shape[-2:]), own.reshape(-1, *own.shape[-2:])
        for expert_moved, expert_own in zip(flat_moved, flat_own, strict=True):
            expected = 0.01 * 0.2 * max(own.shape[-2:]) ** 0.5 * orthogonalised(expert_own)
            scale = 0.01 * 0.2 * max(own.shape[-2:]) ** 0.5
            torch.testing.assert_close(expert_moved.double(), expected, rtol=0, atol=scale * ROUNDING)


def optimizer_of(weights: list[Tensor], make_config: MakeConfig, *overrides: str) -> torch.optim.Optimizer:
    train = make_config("train.optimizer=muon", *overrides).train
    group = {"params": weights, "matrices": [None] * len(weights), "weight_decay": train.weight_decay}
    return make_optimizer([group | {"multiplier": 1.0, "schedule": None}], train)


@given(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.sampled_from([0.0, 1e-30, 1.0, 1e30]))
def test_any_shape_and_size_of_a_gradient(experts: int, rows: int, columns: int, size: float) -> None:
    torch.manual_seed(rows * 100 + columns)
    x = torch.randn(experts, min(rows, columns), max(rows, columns)) * size
    found = polar_factor(x, polynomials(MUON), torch.float32)
    for one, matrix in zip(found, x, strict=True):
        torch.testing.assert_close(one.double(), orthogonalised(matrix), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("shape", [(64, 64), (32, 256), (256, 32), (1, 64), (3, 48, 96)])
def test_updates_have_the_size_of_adamw(make_config: MakeConfig, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = optimizer_of([weight], make_config, "train.weight_decay=0.0")
    weight.grad = torch.randn(shape)
    for group in optimizer.param_groups:
        group["lr"] = 3e-3
    optimizer.step()
    root_mean_square = weight.detach().double().square().mean().sqrt().item()
    # Singular values between 0.88 and 1.12: their root mean square is within 12 %, and of many values within 10 %.
    assert root_mean_square == pytest.approx(0.2 * 3e-3, rel=0.13 if shape[0] == 1 else 0.1)


@pytest.mark.parametrize("most", [1, 10**9])
def test_a_batch_of_experts_is_a_loop(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    torch.manual_seed(0)
    stacked, gradient = torch.randn(5, 24, 40), torch.randn(5, 24, 40)
    together = nn.Parameter(stacked.clone())
    apart = [nn.Parameter(expert.clone()) for expert in stacked]
    together.grad = gradient.clone()
    for each, own in zip(apart, gradient, strict=True):
        each.grad = own.clone()
    monkeypatch.setattr(muon, "MOST", most)
    for weights in ([together], apart):
        optimizer_of(weights, make_config).step()
    torch.testing.assert_close(together.detach(), torch.stack([each.detach() for each in apart]), rtol=0, atol=1e-6)


def test_a_matrix_that_is_not_finite_changes_no_other() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8, 12)
    alone = polar_factor(x[[0, 2]], polynomials(MUON), torch.float32)
    x[1, 2, 3] = float("nan")
    found = polar_factor(x, polynomials(MUON), torch.float32)
    assert torch.equal(found[[0, 2]], alone)
    assert found[1].isnan().any()


def test_weight_decay_is_cautious(make_config: MakeConfig) -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(16, 24), torch.randn(16, 24)
    moved = {}
    for name, overrides in {
        "none": ("weight_decay=0.0",),
        "cautious": (),
        "all": ("optimizer.cautious=false",),
    }.items():
        weight = nn.Parameter(start.clone())
        weight.grad = gradient.clone()
        optimizer_of([weight], make_config, *(f"train.{override}" for override in overrides)).step()
        moved[name] = weight.detach()
    decay = make_config().train.learning_rate * make_config().train.weight_decay
    update = start - moved["none"]
    # Weights of size 3 are rounded by 2^-23.
    expected = moved["none"] - decay * start * (update * start > 0)
    torch.testing.assert_close(moved["cautious"], expected, rtol=0, atol=2**-22)
    torch.testing.assert_close(moved["all"], moved["none"] - decay * start, rtol=0, atol=2**-22)


def test_what_is_no_matrix_has_the_bits_of_adamw(make_config: MakeConfig) -> None:
    after = {}
    for kind in ("adamw", "muon"):
        config = make_config(f"train.optimizer={kind}", "model.tie_embeddings=false")
        torch.manual_seed(0)
        model = build_loss_model(config)
        optimizer = make_optimizer(parameter_groups(model, config.train), config.train)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape)
            optimizer.step()
        after[kind] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    same = {name for name, weight in after["adamw"].items() if torch.equal(weight, after["muon"][name])}
    others = {name.rpartition("blocks.")[2] for name in after["adamw"].keys() - same}
    assert any("embedding" in name for name in same)
    assert any("head" in name for name in same)
    leaves = {"weight", "w_up", "w_down"}
    assert {name.rpartition(".")[2] for name in others} == leaves, others
    assert not [name for name in others if "norm" in name or "router" in name or "ln_x" in name]
    config = make_config("train.optimizer={kind: muon, experts: false}")
    for group in parameter_groups(build_loss_model(config), config.train):
        assert "matrices" not in group or all(parameter.dim() == 2 for parameter in group["params"])


def test_no_number_of_threads_changes_a_bit(make_config: MakeConfig) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in ((3, 64, 150), (100, 300), (33, 70), (1, 500), (200, 37))]
    gradients = [torch.randn(weight.shape) for weight in start]
    if not multiply_on_one_thread():
        pytest.skip("products run on one thread only where PyTorch has MKL")
    found = []
    try:
        for number in (1, 2, 3, 4):
            set_num_threads(number)
            weights = [nn.Parameter(weight.clone()) for weight in start]
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient.clone()
            optimizer_of(weights, make_config).step()
            found.append([weight.detach() for weight in weights])
    finally:
        multiply_on_all_threads()
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_deepspeed_does_not_take_it_for_its_own(make_config: MakeConfig) -> None:
    optimizer = optimizer_of([nn.Parameter(torch.zeros(2, 2))], make_config)
    assert "muon" not in type(optimizer).__name__.lower()
    assert not hasattr(optimizer.param_groups[0]["params"][0], "use_muon")
    assert "use_muon" not in optimizer.param_groups[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.zero_stage=2",
            "train.zero_stage: found 2 (an integer)\n    allowed: auto, 0 or 1 with train.optimizer",
        ),
        (
            "train.zero_stage=3",
            "train.zero_stage: found 3 (an integer)\n    allowed: auto, 0 or 1 with train.optimizer",
        ),
        ("train.optimizer=muons", 'found "muons" (a string)\n    allowed: one of adamw, muon\n    did you mean muon?'),
        ("train.optimizer={kind: adamw, momentum: 0.9}", "0.95, for kind=adamw; it is a key of muon"),
        ("train.groups={embeding: {rate: 2.0}}", "unknown kind of parameter\n    allowed: one of matrix, projection,"),
        ("train.schedule={kind: linear, decay: 0.5}", "0.2, for kind=linear; it is a key of wsd"),
        ("train.groups={head: {schedule: {kind: cosine, shape: linear}}}", "sqrt, for kind=cosine; it is a key of wsd"),
        (
            "train.schedule={kind: wsd, decay: 0.08}",  # of 6 steps: 0.48, which rounds to 0
            "schedule.decay: found 0.08 (a number)\n    allowed: above 0.0833333 with train.steps=6: a shorter",
        ),
        (
            "train.groups={embedding: {schedule: {kind: wsd, decay: 0.01}}}",
            "train.groups.embedding.schedule.decay: found 0.01 (a number)\n    allowed: above 0.0833333 with",
        ),
    ],
)
def test_wrong_combinations_are_refused(make_config: MakeConfig, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config("train.optimizer=muon", override)
    assert message in str(caught.value)


def test_a_kind_alone_is_a_section(make_config: MakeConfig) -> None:
    config = make_config("train.optimizer.momentum=0.9", "train.optimizer=muon", "train.schedule=wsd")
    assert config.train.optimizer == Optimizer(kind="muon", momentum=0.9)
    assert config.train.schedule.kind == "wsd"
    assert make_config("train.optimizer=adamw").hash() == make_config().hash()


def results_of(work: Any, folder: Path, processes: int, parallel: list[int], **options: Any) -> dict[str, Any]:
    where = folder / f"told-{processes}.json"
    options = {"folder": str(folder), "parallel": json.dumps(parallel), "load": "[]"} | options
    finished = work("muon", where, processes=processes, script="muon_worker.py", **options)
    assert [process.returncode for process in finished] == [0] * processes, "\n".join(f.stdout for f in finished)
    found: dict[str, Any] = json.loads(where.read_text())
    print(found)  # the figures, for who wants them: pytest -rP
    return found


# A gradient's error of 222 * 2^-24 (test_engine.py) grows in an update about 500 times: by the slope of the iteration
# at small singular values, about 1000, over a divisor of about 2. A missing exchange is an error of 1.
UPDATE = 500 * 222 * 2**-24


def check(found: dict[str, Any], processes: int) -> None:
    for name, result in found.items():
        if name.startswith("steps"):
            assert result["update"] < UPDATE, name
            if processes > 1:  # the embedding's two moments are half of the state, and have one owner
                assert result["share"] < 0.9, name
        else:
            assert result is True, name


def test_one_process_equals_plain_pytorch_and_resumes(work: Any, tmp_path: Path) -> None:
    check(results_of(work, tmp_path, 1, [1], resume="yes"), 1)


@pytest.mark.slow
def test_processes_share_whole_matrices(work: Any, tmp_path: Path) -> None:
    """One test, since each number of processes loads what another has saved."""
    check(results_of(work, tmp_path, 2, [1, 2], resume="yes"), 2)
    load = json.dumps([("saved-2-1", 1), ("saved-2-2", 4)])
    check(results_of(work, tmp_path, 4, [1, 2], load=load), 4)
    check(results_of(work, tmp_path, 1, [1], load=json.dumps([("saved-4-2", 1), ("saved-2-1", 1)])), 1)
