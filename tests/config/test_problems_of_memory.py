"""What is said about memory modes that do not go together, and that the others are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError

CDRMIX = """\
model: {d_model: 128, layers: 4, attention: {heads: 4}, feed_forward: {hidden: 256}}
train: {steps: 500, batch_rows: 8, micro_batch_rows: 8, learning_rate: 3e-3}
"""
LLAMA = """\
model: {kind: huggingface, random: {model_type: llama, vocab_size: 300}}
data: {tokenizer: {path: tokenizer.json}}
train: {steps: 500, batch_rows: 8, micro_batch_rows: 8, learning_rate: 3e-3}
"""
NARROW = "fp32, or train.precision: bf16 and train.zero_stage: auto, 1, 2 or 3"
IN_PARTS = "none, or train.zero_stage: auto, 2 or 3 and train.expert_parallel: 1"


@pytest.mark.parametrize(
    ("text", "settings", "key", "allowed"),
    [
        (CDRMIX, "weights=bf16 zero_stage=2", "weights", "fp32, for a model of cdrmix: its norms and routers need"),
        (LLAMA, "weights=bf16", "weights", NARROW),
        (LLAMA, "weights=bf16 zero_stage=auto precision=fp16", "weights", NARROW),
        (CDRMIX, "offload=optimizer", "offload", IN_PARTS),
        (CDRMIX, "offload=optimizer zero_stage=1", "offload", IN_PARTS),
        (CDRMIX, "offload=optimizer zero_stage=2 expert_parallel=2", "offload", IN_PARTS),
        (CDRMIX, "offload=all zero_stage=2", "offload", "none, or train.zero_stage: auto or 3 and"),
        (
            CDRMIX,
            "offload=all zero_stage=auto compile=true",
            "compile",
            "false, or train.zero_stage below 3 and train.offload none or optimizer and train.expert_parallel 1",
        ),
        (CDRMIX, "offload_folder=state", "offload_folder", "null, or train.offload: optimizer or all and"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, text: str, settings: str, key: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, settings)
    assert f"train.{key}: found" in str(caught.value)
    assert f"allowed: {allowed}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (LLAMA, "weights=bf16 zero_stage=auto"),
        (LLAMA, "weights=bf16 zero_stage=1"),
        (LLAMA, "weights=bf16 zero_stage=3 offload=all offload_folder=state"),
        (CDRMIX, "offload=optimizer zero_stage=2 offload_folder=state compile=true"),
        (CDRMIX, "offload=optimizer zero_stage=3"),
        (CDRMIX, "offload=all zero_stage=auto"),
    ],
)
def test_what_goes_together(tmp_path: Path, text: str, settings: str) -> None:
    read(tmp_path, text, settings)


LORA = LLAMA.replace("random: {model_type: llama, vocab_size: 300}", "path: models/a, lora: {quantize: nf4}")


@pytest.mark.parametrize("stage", ["zero_stage=3", "zero_stage=auto offload=all"])
def test_quantized_weights_are_not_sharded(tmp_path: Path, stage: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, LORA, stage)
    assert "model.lora.quantize: found" in str(caught.value)
    assert "allowed: null, or train.zero_stage below 3 and train.offload none" in str(caught.value)
    read(tmp_path, LORA, "zero_stage=auto offload=optimizer")


@pytest.mark.parametrize(
    ("text", "key", "value", "allowed"),
    [
        (CDRMIX, "weights", "bf16", "fp32, for a model of cdrmix"),
        (CDRMIX, "lora", "adapter", "merge, for a model of cdrmix"),
        (LLAMA, "lora", "adapter", "merge, without model.lora"),
    ],
)
def test_keys_of_an_export_that_would_have_no_effect(
    tmp_path: Path, text: str, key: str, value: str, allowed: str
) -> None:
    text += f"export: {{{key}: {value}}}\n"
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, "")
    assert f"export.{key}: found" in str(caught.value)
    assert f"allowed: {allowed}" in str(caught.value)


def test_adapters_alone_are_exported_in_float32(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, LORA + "export: {weights: bf16, lora: adapter}\n", "")
    assert "export.weights: found bf16" in " ".join(str(caught.value).replace('"', "").split())
    assert "allowed: fp32, or export.lora: merge" in str(caught.value)
    for alone in ("weights: bf16", "lora: adapter"):
        read(tmp_path, LORA + f"export: {{{alone}}}\n", "")


def read(folder: Path, text: str, settings: str) -> Config:
    path = folder / "run.yaml"
    path.write_text(text)
    return Config.from_yaml(path, [f"train.{setting}" for setting in settings.split()])
