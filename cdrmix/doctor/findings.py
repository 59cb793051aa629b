"""What a check of the machine found, and the model and text that the checks share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from cdrmix.config.schema import Config

WORDS = ("the", "loop", "reads", "rows", "adds", "gradients", "clips", "steps", "and", "forgets", "them", "again")
ROWS = 8  # of a global batch


class Finding(NamedTuple):
    """The result of a check. found: a figure or a fact. remedy: what to do where it did not pass."""

    check: str
    passed: bool
    found: str
    remedy: str = ""


def configuration(folder: Path, device: str, *overrides: str) -> Config:
    """A model of 800,000 parameters with attention, RWKV-7, Mamba-2, Routing-Mamba and experts, and text for it."""
    texts = folder / "texts"
    if not texts.exists():
        texts.mkdir(parents=True)
        for number in range(80):
            words = [WORDS[(number * 7 + index * index) % len(WORDS)] for index in range(10 + number % 23)]
            (texts / f"{number:03d}.txt").write_text(" ".join(words) + "\n", encoding="utf-8")
    path = folder / "doctor.yaml"
    if not path.exists():  # several processes read it
        path.write_text(
            json.dumps(  # which is YAML too
                {
                    "run": {"name": "doctor", "root": str(folder / "runs"), "device": device},
                    "model": {
                        "vocab_size": 300,
                        "d_model": 128,
                        "layers": 4,
                        "mixer_layers": {"mamba2": [0], "attention": [1], "routing_mamba": [3]},
                        "attention": {"heads": 8, "kv_heads": 2},
                        "rwkv": {"head_size": 32, "decay_rank": 4, "iclr_rank": 4, "value_rank": 4, "gate_rank": 4},
                        "mamba": {"d_state": 8, "head_dim": 8, "groups": 2},
                        "feed_forward": {"hidden": 32, "experts": 4},
                    },
                    "data": {
                        "source": {"kind": "text", "paths": [str(texts)]},
                        "cache": str(folder / "cache"),
                        "row_length": 32,
                        "valid_fraction": 0.2,
                    },
                    "train": {
                        "steps": 6,
                        "batch_rows": ROWS,
                        "micro_batch_rows": ROWS,
                        "learning_rate": 1.0e-2,
                        "warmup_steps": 2,
                        "precision": "fp32",
                        "evaluate_every": 6,
                        "evaluate_rows": 4,
                        "checkpoint_every": 3,
                    },
                }
            ),
            encoding="utf-8",
        )
    return Config.from_yaml(path, overrides)
