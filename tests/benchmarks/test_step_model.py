"""The modelled GPU step: it counts the operations that the formulas give, and a part that a change shrinks shrinks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cdrmix.config.schema import Config
from cdrmix.plan.flops import training_flops_per_token

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "cdrmix-core-tiny.yaml"


def modelled(folder: Path, *overrides: str) -> dict[str, Any]:
    """The row that the program appends for core-tiny."""
    rows = folder / "rows.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks" / "step_model.py"), "--config", str(TINY), "--append", str(rows)]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("CDRMIX_BACKEND", "PYTHONSAFEPATH")
    }
    done = subprocess.run([*command, *overrides], check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "modelled:" in done.stdout
    row: dict[str, Any] = json.loads(rows.read_text().splitlines()[-1])
    return row


@pytest.mark.slow
def test_it_counts_the_products_of_the_formula(tmp_path: Path) -> None:
    row = modelled(tmp_path)
    config = Config.from_yaml(TINY)
    products = [cost["flops"] for part, cost in row["parts"].items() if part != "attention"]
    wanted = training_flops_per_token(config).parameters * row["tokens"]
    # The formula counts vectors (norms, mixes, biases: 2 % of this model's active parameters) as matrices.
    assert 0.97 * wanted < sum(products) <= wanted
    assert 0 < row["mfu"] < 1
    assert row["bytes"] == sum(cost["bytes"] for cost in row["parts"].values())


@pytest.mark.long
def test_a_gpu_reads_less_where_activations_are_fewer(tmp_path: Path) -> None:
    whole, half = modelled(tmp_path), modelled(tmp_path, "train.micro_batch_rows=8")
    assert half["tokens"] == whole["tokens"] // 2
    for part in ("experts", "low-rank products", "loss"):  # a width of 128 is low
        assert half["parts"][part]["flops"] * 2 == whole["parts"][part]["flops"]
    assert half["launches"] == whole["launches"]
