"""The matrix of architectures: its cells run in processes with a time limit, and the page has the kept results."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers, which is not installed")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
matrix: Any = importlib.import_module("hf_matrix")
columns: Any = importlib.import_module("hf_columns")
training: Any = importlib.import_module("hf_training")
sys.path.remove(str(ROOT / "benchmarks"))

EXPLAINED = {("olmo_hybrid", "zero")}  # not as promised; the page says why


@pytest.fixture
def added() -> Iterator[dict[str, Any]]:
    """The table of columns, which a test may change."""
    kept = dict(columns.COLUMNS)
    yield columns.COLUMNS
    columns.COLUMNS.clear()
    columns.COLUMNS.update(kept)


def test_the_table_is_that_of_the_kept_results() -> None:
    """After a change of either, `python benchmarks/hf_matrix.py` writes it again."""
    text, cells = matrix.PAGE.read_text(), matrix.latest(matrix.read(matrix.RESULTS))
    assert matrix.with_table(text, cells) == text
    assert {(name, column) for name in matrix.ARCHITECTURES for column in matrix.COLUMNS} == set(cells)
    assert {cell for cell, row in cells.items() if not row["good"]} == EXPLAINED


@pytest.mark.usefixtures("own_settings")
def test_a_cell_is_run_once_and_written_to_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, page = tmp_path / "results" / "matrix.jsonl", tmp_path / "page.md"
    page.write_text("before\n<!-- matrix -->\n<!-- end -->\nafter\n")
    options = ["--architecture", "gpt2", "--column", "loss", "--results", str(results), "--page", str(page)]
    monkeypatch.setattr(sys, "argv", ["hf_matrix.py", *options])
    assert matrix.main() == 0
    assert capsys.readouterr().out.startswith("gpt2 loss: fused (")
    (line,) = results.read_text().splitlines()
    row = json.loads(line)
    assert (row["architecture"], row["column"], row["good"]) == ("gpt2", "loss", True)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert f"| gpt2 | not run | {row['verdict']} | not run |" in text
    assert "| llama | not run | not run | not run |" in text
    assert matrix.main() == 0
    assert capsys.readouterr().out == ""
    assert results.read_text().splitlines() == [line]
    monkeypatch.setattr(sys, "argv", ["hf_matrix.py", "--again", *options])
    assert matrix.main() == 0
    assert len(results.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("architecture", "column", "verdict"),
    [
        pytest.param("llama", "lora", "yes (", marks=pytest.mark.slow),
        # one document a row
        pytest.param("lfm2", "resume", "bit for bit", marks=pytest.mark.slow),
        # ZeRO-3 shards weights that other modules read
        pytest.param("nemotron_h", "zero", "0-3 (0, ", marks=pytest.mark.long),
        # ZeRO-3 reduces gradients of experts in backward hooks
        pytest.param("qwen3_moe", "zero", "0-3 (0, ", marks=pytest.mark.long),
        # products of odd numbers of rows
        pytest.param("lfm2", "zero", "0-3 (0, ", marks=pytest.mark.long),
    ],
)
def test_tiny_models_train(tmp_path: Path, architecture: str, column: str, verdict: str) -> None:
    """In a new interpreter: a copy of a process that has threads, or a process group of earlier tests, may hang."""
    results, page = tmp_path / "results.jsonl", shutil.copy(matrix.PAGE, tmp_path)
    order = ("--architecture", architecture, "--column", column, "--results", str(results), "--page", page)
    where = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
    subprocess.run([sys.executable, ROOT / "benchmarks" / "hf_matrix.py", *order], env=where, check=False)
    (row,) = matrix.read(results)
    assert row["verdict"].startswith(verdict)
    assert row["good"], row["verdict"]


def test_lost_state_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is not loaded, and a merge without the adapters."""
    monkeypatch.setattr(training, "load_checkpoint", lambda *_: None)
    monkeypatch.setattr(training, "merge_adapters", lambda model, *_, **__: model)
    rows = [matrix.run("llama", column, 300.0) for column in ("resume", "lora")]
    assert not any(row["good"] for row in rows)
    assert "tensors differ: weight " in rows[0]["verdict"]
    assert rows[1]["verdict"].startswith("yes (")  # far from the model with adapters


def test_a_cell_that_fails_ends_with_its_verdict(added: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    def fails(_: str) -> None:
        raise ValueError("no such layer\nand more")

    added["fails"] = ("", fails)
    added["hangs"] = ("", lambda _: time.sleep(60))
    added["dies"] = ("", lambda _: os._exit(3))
    rows = [matrix.run("llama", column, 1.0) for column in ("fails", "hangs", "dies")]
    assert [row["verdict"] for row in rows] == [
        "failed: ValueError: no such layer",
        "more than 1 s",
        "the process died",
    ]
    assert not any(row["good"] for row in rows)
    assert "ValueError: no such layer" in capfd.readouterr().err
    shown = matrix.with_table(
        "<!-- matrix -->\n<!-- end -->",
        {("llama", "loss"): rows[0] | {"versions": {"transformers": "5.23.0"}}},
    )
    assert "**failed: ValueError: no such layer**" in shown
    with pytest.raises(ValueError, match="<!-- matrix -->"):
        matrix.with_table("no markers", {})
