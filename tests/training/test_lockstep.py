"""Rollouts under ZeRO-3 and with expert parallelism: without a copy of the model, as with whole models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.inference.checkpoints import newest_whole_checkpoint, read_weights

PHASE = {"steps": 2, "episodes": 4, "micro_batch": 4, "learning_rate": 1.0e-2, "warmup_steps": 0}
REASONING: dict[str, Any] = {
    "chunk": 16,
    "plastic_lora": {"rank": 4, "key_width": 8, "alpha": 1.0, "decay": 1.0},
    "controller": {"step_budget": 64, "max_branches": 2},
    "memory": {"dim": 8, "top_k": 2, "max_tokens": 4096, "tokens": 6},
    # An untrained model answers nothing: the likelihood of the right answer differs between rollouts all the same.
    "rl": {"horizon": 64, "latency_weight": 0.3, "stability_weight": 0.1, "group_size": 3, "reward": "likelihood"},
    "plasticity": {"task": "recall", "tokens": True, "chunks": 3},
    "acceptance": {"task": "poisoned", "tokens": True, "chunks": 3},
    "agent": {"task": "agent", "tokens": True, "chunks": 3},
    "operations": {"task": "hops", "tokens": True, "chunks": 3},
    "phases": {
        "plasticity": PHASE | {"train": "all"},
        "acceptance": PHASE,
        "imitation": PHASE | {"train": "all"},
        "policy": PHASE | {"train": "all", "replay": ["plasticity"]},
        "operations_imitation": PHASE | {"train": "all", "replay": ["text"], "summarised_batches": 1.0},
        "operations": PHASE | {"train": "all"},
        "joint": PHASE,
    },
    "evaluation": {"chunks": [2], "episodes": 4},
}


@pytest.fixture
def reasoning(config_file: Path, tmp_path: Path) -> Path:
    """The tiny configuration with every phase of stage B."""
    content = yaml.safe_load(config_file.read_text())
    train = content["train"] | {
        "steps": 2,
        "micro_batch_rows": 1,
        "warmup_steps": 1,
        "evaluate_every": 2,
        "log_every": 1,
    }
    content |= {"train": train, "reasoning": REASONING}
    path = tmp_path / "reasoning.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


class Trained:
    """A run that has ended: its weights, its records, and the passes that each process has made."""

    def __init__(self, folder: Path, output: str) -> None:
        newest = newest_whole_checkpoint(folder / "checkpoints")
        assert newest is not None
        self.weights = read_weights(newest)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        self.records = [json.loads(line) for line in lines]
        self.passes = json.loads(output.strip().splitlines()[-1])["passes"]

    def differing(self, other: Trained) -> list[str]:
        """The names of weights with other bits."""
        assert self.weights.keys() == other.weights.keys()
        return [name for name, tensor in self.weights.items() if not torch.equal(tensor, other.weights[name])]


Train = Callable[..., Trained]


@pytest.fixture
def train(work: Any, reasoning: Path, tmp_path: Path) -> Train:
    def run(name: str, *overrides: str, processes: int = 2) -> Trained:
        told = work(
            "train", tmp_path / name, *overrides, processes=processes, script="rollout_worker.py", config=str(reasoning)
        )
        assert [each.returncode for each in told] == [0] * processes, "\n".join(each.stdout for each in told)
        return Trained(tmp_path / name, told[0].stdout)

    return run


def test_sharded(train) -> None:
    whole = train("whole", "train.zero_stage=0")
    print(whole.passes)
    copied = train("copied", "train.zero_stage=3", "reasoning.rollout_weights=copied")
    print(copied.passes)
    sharded = train("sharded", "train.zero_stage=3")
    print(sharded.passes)
    print(sharded.differing(copied))
    for a, b in zip(whole.records, sharded.records):
        print(a, b)
