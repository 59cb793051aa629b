"""Small corpora and the configurations that name them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="needs pydantic, which is not installed")

from cdrmix.config.schema import Config

MODEL = {
    "d_model": 32,
    "layers": 1,
    "attention": {"heads": 1, "kv_heads": 1},
    "rwkv": {"head_size": 32, "decay_rank": 4, "iclr_rank": 4, "value_rank": 4, "gate_rank": 4},
    "feed_forward": {"hidden": 32},
}
TRAIN = {"steps": 1, "batch_rows": 1, "micro_batch_rows": 1, "learning_rate": 1e-3}

MakeConfig = Callable[..., Config]


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """A function: `data.source` and other keys of `data` to a configuration whose cache is in tmp_path."""

    def make(source: dict[str, Any] | None, *, vocab_size: int = 320, **data: Any) -> Config:
        defaults = {"cache": str(tmp_path / "cache"), "row_length": 16, "valid_fraction": 0.25}
        return Config.model_validate(
            {
                "model": {**MODEL, "vocab_size": vocab_size},
                "data": {**defaults, **data, "source": source},
                "train": TRAIN,
            }
        )

    return make


@pytest.fixture
def texts() -> list[str]:
    """Sixty documents of 1 to 400 characters, all different, some not ASCII, one spelling the end-of-text token."""
    lines = [f"def function_{number}(x):\n    return x + {number}\n" * (number % 9) for number in range(57)]
    return [f"{number}{line}" for number, line in enumerate(lines)] + [
        "naïve Ærøskøbing 東京 🙂",
        "a<|endoftext|>b",
        "\0\r\n",
    ]


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> dict[str, Any]:
    """A `data.source` section for a JSON-lines file of `texts`."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"kind": "jsonl", "paths": [str(path)]}
