"""One process that makes a model under ZeRO-3, told by a JSON argument: what is in it, and the weights' bits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from cdrmix.config.schema import Config
from cdrmix.runtime import seed_everything
from cdrmix.training import deepspeed_config
from cdrmix.training.build import build_loss_model
from cdrmix.training.distributed import join
from cdrmix.training.engine import make_engine
from cdrmix.training.launch import exit_worker

# The model here is so small that ZeRO-3 would keep every parameter whole, and prove nothing about released ones.
deepspeed_config.PERSISTENCE_THRESHOLD = 0


def main(order: dict[str, Any]) -> int:
    """Writes to `where`: elements that a process holds of all, and the weights that differ from a whole model's."""
    config = Config.from_yaml(order["config"], [*order["overrides"], "train.zero_stage=3"])
    whole = Config.from_yaml(order["config"], [*order["overrides"], "train.zero_stage=0", "train.expert_parallel=1"])
    world = join(config)
    seed_everything(3)
    expected = build_loss_model(whole).language_model.state_dict()
    seed_everything(3)
    model = build_loss_model(config)
    whole_here = sum(parameter.numel() for parameter in model.parameters())
    shares = [parameter.ds_tensor.numel() for parameter in model.parameters()]
    engine = make_engine(config, model, world)
    part = engine.weights_part()
    found = {name: tensor for each in world.gather(part) for name, tensor in each.items()}
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    facts = {
        "whole": whole_here,
        "share": sum(shares) / sum(tensor.numel() for tensor in expected.values()),
        "written": [sum(tensor.numel() for tensor in each.values()) for each in world.gather(part)],
        "wrong": wrong + sorted(found.keys() ^ expected.keys()),
    }
    if world.is_main_process:
        Path(order["where"]).write_text(json.dumps(facts))
    return 0


if __name__ == "__main__":
    exit_worker(main(json.loads(sys.argv[1])))
