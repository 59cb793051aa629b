"""What a check of the machine found, and the files that the checks share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from cdrmix.config.schema import Config
from cdrmix.data.batch import Batch
from cdrmix.data.loader import TrainLoader
from cdrmix.data.shards import ShardSet
from cdrmix.model.loss import LossModel

WORDS = ("the", "loop", "reads", "rows", "adds", "gradients", "clips", "steps", "and", "forgets", "them", "again")
ROWS = 8  # of a global batch
ENGINE_TOLERANCE = 2e-6  # the same kernels on both sides: sums of gradients in another order


class Finding(NamedTuple):
    """The result of a check. found: a figure or a fact. remedy: what to do where it did not pass."""

    check: str
    passed: bool
    found: str
    remedy: str = ""


def configuration(folder: Path, device: str, *overrides: str) -> Config:
    """A model of 90,000 parameters with attention, RWKV-7, Mamba-2, Routing-Mamba and experts, and text for it."""
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
                        "d_model": 32,
                        "layers": 4,
                        "mixer_layers": {"mamba2": [0], "attention": [1], "routing_mamba": [3]},
                        "attention": {"heads": 2, "kv_heads": 1},
                        "rwkv": {"head_size": 16, "decay_rank": 4, "iclr_rank": 4, "value_rank": 4, "gate_rank": 4},
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


def loader(config: Config, shards: ShardSet, rank: int = 0, processes: int = 1) -> TrainLoader:
    """The rows of this process, in micro-batches of one row."""
    return TrainLoader(
        shards.train,
        row_length=config.data.row_length,
        batch_rows=ROWS,
        micro_batch_rows=1,
        seed=5,
        rank=rank,
        world_size=processes,
    )


def perturb(parameters: Sequence[torch.Tensor]) -> None:
    """Adds small numbers to all weights. Outputs start at zero, which would hide half of the gradients."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter.device, parameter.dtype), alpha=0.02)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest element."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    scale = expected.abs().max().item()
    difference = (found - expected).abs().max().item()
    return difference / scale if scale else difference


def backward(model: LossModel, batches: Sequence[Batch], device: torch.device) -> float:
    """Adds the gradients of a global batch to those of a model of plain PyTorch. Returns the loss."""
    total = 0.0
    for batch in batches:
        here = batch.to(device)
        arguments = here.ids_BT, here.targets_BT, here.weights_BT, here.cu_seqlens_N, here.token_count
        losses = model(*arguments, 1 / len(batches))
        losses.total.backward()
        total += losses.total.item()
    return total
