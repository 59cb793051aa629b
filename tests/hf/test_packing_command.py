"""`cdrmix train` refuses models of transformers whose documents see each other, and trains them as the message says."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from in_process import main

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
architectures: Any = importlib.import_module("hf_architectures")
sys.path.remove(str(BENCHMARKS))
tiny = architectures.tiny


pytestmark = pytest.mark.usefixtures("without_fla")


def arguments(folder: Path, architecture: str, *overrides: str) -> list[str]:
    """Of `cdrmix train` for two steps of a tiny random model on 24 small files."""
    text = folder / "text"
    text.mkdir(exist_ok=True)
    for number in range(24):
        (text / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n\nprint(f{number}(2))\n")
    described = {"model_type": architecture} | tiny(architecture, 300).to_diff_dict()
    settings = {
        "run": {"root": str(folder / "runs"), "threads": 1},
        "model": {"kind": "huggingface", "random": described},
        "data": {
            "source": {"kind": "text", "paths": [str(text)]},
            "valid_fraction": 0.25,
            "row_length": 32,
            "cache": str(folder / "cache"),
        },
        "train": {
            "steps": 2,
            "learning_rate": 1e-3,
            "batch_rows": 2,
            "micro_batch_rows": 1,
            "warmup_steps": 1,
            "log_every": 1,
        },
    }
    config = folder / f"{architecture}.yaml"
    config.write_text(json.dumps(settings).replace("Infinity", ".inf"))  # JSON is YAML, but for this number
    return ["train", "--config", str(config), "train.precision=fp32", "train.evaluate_rows=4", *overrides]


def test_documents_that_see_each_other_are_refused_until_each_has_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path, "lfm2")) == 2
    message = capsys.readouterr().err
    assert "packed documents see each other in lfm2" in message
    assert "set model.packing: rows" in message
    assert not list((tmp_path / "runs").rglob("checkpoints/*"))
    assert main(arguments(tmp_path, "lfm2", "model.packing=rows")) == 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["nemotron_h", "gpt_oss", "gemma2"])
def test_documents_that_do_not_are_trained(
    architecture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path, architecture)) == 0
