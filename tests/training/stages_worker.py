"""One process that compares the gradients of every ZeRO stage on a device, told by a JSON argument."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from cdrmix.config.schema import Config
from cdrmix.data.loader import train_loader
from cdrmix.data.shards import open_shards
from cdrmix.runtime import seed_everything
from cdrmix.training import deepspeed_config
from cdrmix.training.build import build_loss_model
from cdrmix.training.distributed import join
from cdrmix.training.engine import make_engine
from cdrmix.training.launch import exit_worker

# The model here is so small that ZeRO-3 would keep every parameter whole, and prove nothing about released ones.
deepspeed_config.PERSISTENCE_THRESHOLD = 0


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    scale = expected.abs().max().item()
    return (found - expected).abs().max().item() / scale if scale else found.abs().max().item()


def main(order: dict[str, Any]) -> int:
    """Gradients of one global batch under every ZeRO stage, on the configured device.

    Writes to `where`: the loss's relative error against the model in float32 on the CPU without kernels or engine, and
    the largest error of each stage's gradients against stage 0's, relative to a parameter's largest element.
    """
    split = open_shards(Path(order["shards"])).train
    results: dict[str, float] = {}
    first: dict[str, torch.Tensor] = {}
    for stage in (0, 1, 2, 3):
        config = Config.from_yaml(order["config"], [*order["overrides"], f"train.zero_stage={stage}"])
        world = join(config)
        from deepspeed.utils import safe_get_full_grad  # after join, which tells it the accelerator

        batches = train_loader(config, split).micro_batches(0)
        assert len(batches) > 1
        if stage == 0:
            seed_everything(3)
            os.environ["CDRMIX_BACKEND"] = "reference"
            with torch.no_grad():
                plain = build_loss_model(config)
                arguments = [(b.ids_BT, b.targets_BT, b.weights_BT, b.documents, b.token_count) for b in batches]
                expected = sum(plain(*each, 1 / len(batches)).total.item() for each in arguments)
            del os.environ["CDRMIX_BACKEND"]
        seed_everything(3)
        model = build_loss_model(config)
        engine = make_engine(config, model, world)
        total = 0.0
        for batch in batches:
            losses = engine.forward(batch, last=batch is batches[-1])
            engine.backward(losses.total)
            total += losses.total.item()
        results[f"loss {stage}"] = abs(total / expected - 1)
        found = {
            name: (parameter.grad if stage == 0 else safe_get_full_grad(parameter)).detach().float().cpu()
            for name, parameter in model.named_parameters()
        }
        first = first or found
        results[f"gradient {stage}"] = max(relative(found[name], first[name]) for name in first)
        engine.zero()
    Path(order["where"]).write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    exit_worker(main(json.loads(sys.argv[1])))
