"""A toy ladder that the tests share: two rungs of a few thousand parameters on a small text."""

from __future__ import annotations

from pathlib import Path

import pytest
from built_once import built_once

for name in ("pydantic", "matplotlib"):
    pytest.importorskip(name, reason=f"needs {name}, which is not installed")

import short_endings
from in_process import main

ROOT = Path(__file__).parents[2]
RUNG = """
base: {base}
run: {{name: {name}, threads: 1, device: cpu}}
model:
  vocab_size: 300
  d_model: {width}
  layers: 2
  attention_fraction: 0.5
  attention: {{heads: 1, kv_heads: 1}}
  rwkv: {{head_size: 16}}
  feed_forward: {{kind: dense, hidden: 32}}
data: {{row_length: 32, cache: {folder}/cache, valid_fraction: 0.25, source: {{kind: text, paths: [{folder}/text]}}}}
train:
  steps: {steps}
  batch_rows: 2
  micro_batch_rows: 1
  warmup_steps: 1
  log_every: 1
  evaluate_every: 3
  evaluate_rows: 4
  checkpoint_every: 2
"""
RUNGS = {"toy-a": (16, 6), "toy-b": (32, 8), "toy-c": (48, 10)}  # width, steps
LADDER = """
ladder:
  name: toy
  root: {folder}/ladder
  rungs: [toy-a, toy-b]
  gates: quick
"""


def write_toy_ladder(folder: Path) -> Path:
    """Writes the text, the rungs and the ladder file to a folder. Returns the ladder file."""
    text = folder / "text"
    text.mkdir()
    for number in range(24):
        (text / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n\nprint(f{number}(2))\n")
    for name, (width, steps) in RUNGS.items():
        base = ROOT / "configs" / "base" / "tiny.yaml"
        rung = RUNG.format(base=base, name=name, width=width, steps=steps, folder=folder)
        (folder / f"{name}.yaml").write_text(rung)
    (folder / "ladder.yaml").write_text(LADDER.format(folder=folder))
    return folder / "ladder.yaml"


@pytest.fixture(scope="session")
def climbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a toy ladder whose two rungs are promoted; its folder is beside it. Copy it before a change."""

    def climb(folder: Path) -> None:
        with short_endings.short_endings():
            assert main(["ladder", "run", "--config", str(write_toy_ladder(folder))]) == 0

    return built_once(tmp_path_factory, "toy-ladder", climb) / "ladder.yaml"
