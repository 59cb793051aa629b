"""Plans of models of transformers: parameters, memory by mode, and the refusal of a card that is too small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from in_process import main
from torch import nn

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.plan import foreign
from cdrmix.plan.fit import MAX_MEMORY_SHARE, at_most, check_memory, fit
from cdrmix.plan.foreign import foreign_size, foreign_trace
from cdrmix.plan.machine import Machine, machine_for
from cdrmix.plan.memory import memory_of
from cdrmix.plan.parameters import count_of

CONFIGS = Path(__file__).parents[2] / "configs"
PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"  # the 52 blocks of Nemotron-H-8B
KINDS = {"M": "linear_attention", "-": "mlp", "*": "full_attention"}


@pytest.fixture(scope="module")
def nemotron_h(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the description of a model of the size of Nemotron-H-8B, without weights."""
    folder = tmp_path_factory.mktemp("nemotron-h-8b")
    described = {"model_type": "nemotron_h", "layers_block_type": [KINDS[kind] for kind in PATTERN]}
    (folder / "config.json").write_text(json.dumps(described | {"vocab_size": 131072}))
    return folder


def preset(name: str, folder: Path, *overrides: str) -> Config:
    return Config.from_yaml(CONFIGS / f"cpt-nemotron-h-8b-{name}.yaml", [f"model.path={folder}", *overrides])


def small(*overrides: str) -> Config:
    """A llama with 0.6 M parameters."""
    return Config.from_yaml(CONFIGS / "cpt-tiny-base.yaml", ["model.random.num_hidden_layers=2", *overrides])


def parts(config: Config, processes: int = 1) -> dict[str, float]:
    """The components in GB."""
    return {part.name: part.bytes / 1e9 for part in memory_of(config, "cuda", processes).components}


def card(size: float) -> Machine:
    return Machine("a card", "cuda", int(size), None, "a test", False, None)


def test_a_model_of_the_size_of_nemotron_h_8b(nemotron_h: Path) -> None:
    config = preset("24gb", nemotron_h)
    count = count_of(config)
    assert count.total_stored == count.total_active == pytest.approx(8.10e9, rel=1e-3)
    assert count.stored["embedding"] == count.stored["head"] == 131072 * 4096
    size = foreign_size(config)
    assert (size.layers, size.width, size.trained) == (52, 4096, size.total_stored)
    assert size.attention == 4 * 4096
    adapters = foreign_size(preset("lora-24gb", nemotron_h))
    assert adapters.trained == adapters.stored["adapters"] == pytest.approx(30.1e6, rel=2e-3)


@pytest.mark.slow
def test_all_weights_on_a_card_of_24_gb(nemotron_h: Path) -> None:
    """16.2 GB of weights, inputs of 52 blocks of 33.6 MB, 18 bytes a parameter in main memory."""
    config = preset("24gb", nemotron_h)
    memory = memory_of(config, "cuda", 1)
    assert parts(config)["weights"] == pytest.approx(16.2, rel=0.01)
    assert memory.saved_by_operator["aten.add"] / 1e9 == pytest.approx(1.7, rel=0.05)
    assert memory.tensors / 1e9 == pytest.approx(20, rel=0.1)
    saving = 4 * 8.10  # the weights in float32, gathered
    assert memory.host_bytes / 1e9 == pytest.approx(18 * 8.10 + saving, rel=0.01)
    assert fit(config, machine_for(config, "rtx4090", 1), 1).fits
    whole = preset("24gb", nemotron_h, "train.offload=none")
    found = fit(whole, machine_for(whole, "rtx4090", 1), 1, remedies=False)
    assert found.fits is False


@pytest.mark.long
def test_adapters_on_a_card_of_24_gb(nemotron_h: Path) -> None:
    config = preset("lora-24gb", nemotron_h)
    memory = memory_of(config, "cuda", 1)
    assert memory.tensors / 1e9 == pytest.approx(20, rel=0.1)
    quantized = memory_of(preset("lora-24gb", nemotron_h, "model.lora.quantize=nf4"), "cuda", 1)
    # Not 4 bits: embedding, head, and `out_proj` of 24 layers, whose weight the kernels read.
    four_bits = 8.10e9 - 2 * 131072 * 4096 - 24 * 8192 * 4096
    assert memory.total - quantized.total == pytest.approx((2 - 0.52) * four_bits, rel=0.02)


@pytest.mark.slow
def test_all_weights_on_four_cards_of_80_gb(nemotron_h: Path) -> None:
    """18 bytes a parameter over four cards: 2 weights, 4 masters, 8 moments, 4 gradients."""
    config = preset("4x80gb", nemotron_h)
    found = parts(config, 4)
    state = sum(found[name] for name in ("weights", "masters", "optimizer", "gradients"))
    assert state == pytest.approx(18 * 8.10 / 4, rel=0.01)
    assert memory_of(config, "cuda", 4).saved_by_operator["aten.add"] / 1e9 == pytest.approx(14, rel=0.05)
    assert fit(config, machine_for(config, "h100", 4), 4).fits


@pytest.mark.parametrize(
    ("settings", "device", "host"),
    [  # bytes of weights and state for a trained parameter, in one process with one micro-batch
        ((), 12, 12),  # weights and moments in float32; gathered with the moments at the end
        (("weights=bf16", "zero_stage=2"), 2 + 4 + 8 + 4, 4),
        (("weights=bf16", "zero_stage=2", "offload=optimizer"), 2, 18 + 4),
        (("weights=bf16", "zero_stage=3", "offload=optimizer"), 2, 20 + 4),
        (("weights=bf16", "zero_stage=3", "offload=all"), 0, 22 + 4),
    ],
)
def test_bytes_of_a_parameter_in_each_mode(settings: tuple[str, ...], device: int, host: int) -> None:
    config = small("train.precision=bf16", *(f"train.{setting}" for setting in settings))
    parameters = count_of(config).total_stored
    memory = memory_of(config, "cuda", 1)
    state = sum(
        part.bytes for part in memory.components if part.name in ("weights", "masters", "optimizer", "gradients")
    )
    assert (state, memory.host_bytes) == (device * parameters, host * parameters)


def test_checkpointing_and_the_fused_loss_are_traced() -> None:
    config = small("train.precision=bf16", "data.row_length=1024")
    plain = foreign_trace(config, "cuda", gradients_stay=False)
    again = foreign_trace(
        small(*["train.precision=bf16", "data.row_length=1024", "train.activation_checkpointing=true"]),
        "cuda",
        gradients_stay=False,
    )
    assert not plain.untraced
    assert not again.untraced
    assert 2 * again.step.total_saved < plain.step.total_saved
    logits = 4 * 8 * 1024 * 2048
    assert again.step.total_saved < logits


def test_a_card_that_is_too_small_is_refused_with_settings_that_fit() -> None:
    config = small("train.batch_rows=64", "train.micro_batch_rows=16", "data.row_length=1024")
    needed = memory_of(config, "cuda", 1).total
    assert at_most(config, 1) > 1.5 * needed
    check_memory(config, card(needed / MAX_MEMORY_SHARE + 1), 1)
    tight = card(0.99 * needed / MAX_MEMORY_SHARE)
    with pytest.raises(ConfigError, match=r"takes .* and a card has .* What would fit: ") as refused:
        check_memory(config, tight, 1)
    named = str(refused.value).split("What would fit: ")[1].split(" (")[0].split()
    overrides = [setting for setting in named if setting.startswith("train.")]
    base = ["train.batch_rows=64", "train.micro_batch_rows=16", "data.row_length=1024"]
    assert fit(small(*base, *overrides), tight, 1).fits


def test_offload_and_adapters_are_proposed(tmp_path: Path) -> None:
    """Where the state of the optimizer is what does not fit."""
    wide = {"vocab_size": 512, "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **wide}))
    overrides = [f"model.path={tmp_path}", "data.row_length=128"]
    config = Config.from_yaml(CONFIGS / "cpt-tiny.yaml", [*overrides, "train.batch_rows=1", "train.micro_batch_rows=1"])
    settings = [" ".join(remedy.settings) for remedy in fit(config, card(4e9), 1).remedies]
    assert any("train.offload=optimizer" in each and "train.weights=bf16" in each for each in settings), settings
    assert any("model.lora={}" in each for each in settings)
    assert any("model.lora={quantize: nf4}" in each for each in settings)
    proposed = next(each for each in settings if "model.lora={quantize: nf4}" in each)
    Config.from_yaml(CONFIGS / "cpt-tiny.yaml", [*overrides, "model.lora={quantize: nf4}"])
    assert "train.precision=bf16" in proposed


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(small().to_yaml())
    assert main(["params", "--config", str(path)]) == 0
    assert "embedding" in capsys.readouterr().out
    assert main(["plan", "--config", str(path), "--gpu", "rtx4090", "train.precision=bf16"]) == 0
    assert "traced" in capsys.readouterr().out
    assert main(["plan", "--config", str(path), "--gpu", "cpu"]) == 0


EXPERTS = {
    "model_type": "qwen3_moe",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 192,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def experts(*overrides: str) -> Config:
    return small(f"model.random={json.dumps(EXPERTS)}", "train.precision=bf16", "data.row_length=512", *overrides)


def test_a_model_without_a_trace_is_estimated_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fake tensors do not support the products of experts whose weights are float32."""
    config = experts("train.micro_batch_rows=4")
    memory = memory_of(config, "cuda", 1)
    assert "estimated by a formula" in next(part.why for part in memory.components if part.name == "activations")
    path = tmp_path / "experts.yaml"
    path.write_text(config.to_yaml())
    assert main(["plan", "--config", str(path), "--gpu", "rtx4090"]) == 0
    why = "The activations are estimated by a formula, because an operator of the model cannot be traced: Expected"
    assert why in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match=why):
        check_memory(config, card(1e9), 1)


def test_the_estimate_of_a_mixture_of_experts_is_near_the_trace() -> None:
    """With bf16 weights it can be traced; the estimate must not leave the experts of a token out."""
    config = experts("train.weights=bf16", "train.zero_stage=2")
    traced = foreign_trace(config, "cuda", gradients_stay=True)
    assert not traced.untraced
    estimated = foreign._estimated(config, foreign_size(config))
    assert 1 < estimated.total_saved / traced.step.total_saved < 1.5


def test_only_errors_of_operators_are_replaced_by_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise TypeError("a defect")

    monkeypatch.setattr(foreign, "_traced", fails)
    with pytest.raises(TypeError, match="a defect"):
        foreign_trace(small("data.row_length=192"), "cuda", gradients_stay=False)


def test_blocks_are_not_taken_for_experts() -> None:
    """Where every expert is a module, a block can have more of them than the model has blocks."""
    block = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(4, 6, bias=False) for _ in range(8))})
    model = nn.ModuleDict({"layers": nn.ModuleList([block, nn.ModuleDict()])})
    assert foreign._blocks(model) == [*model["layers"]]
    assert foreign._features(block, experts=8, top_k=2) == 2 * (4 + 6)
