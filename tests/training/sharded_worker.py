"""One process that makes a model under ZeRO-3, told by a JSON argument: what is in it, its bits, and casts of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from cdrmix.config.schema import Config
from cdrmix.plan.trace import LiveBytes
from cdrmix.runtime import seed_everything
from cdrmix.training import deepspeed_config
from cdrmix.training.build import build_loss_model
from cdrmix.training.distributed import join
from cdrmix.training.engine import Engine, make_engine
from cdrmix.training.launch import exit_worker

# The model here is so small that ZeRO-3 would keep every parameter whole, and prove nothing about released ones.
deepspeed_config.PERSISTENCE_THRESHOLD = 0


def casts_at_the_end(engine: Engine, config: Config) -> int:
    """Bytes of the 16-bit copies that are there when the last block of a forward pass has ended: those of weights, and
    the block's result."""
    live, found = LiveBytes("cpu"), []
    blocks = engine.module.loss_model.language_model.blocks
    ended = blocks[-1].register_forward_hook(lambda *_: found.append(live.by_operator().get("aten._to_copy", 0)))
    rows, length = config.train.micro_batch_rows, config.data.row_length
    ids = torch.zeros(rows, length, dtype=torch.long)
    borders = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
    with live:
        losses = engine.evaluate(ids, ids, torch.ones(rows, length), borders, float(rows * length), 1.0, last=True)
    ended.remove()
    engine.backward(losses.total)
    return found[0]


def main(order: dict[str, Any]) -> int:
    """Writes to `where`: elements that a process holds of all, the weights that differ from a whole model's, and bytes
    of casts."""
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
    found = {name: tensor for each in world.gather(part, "the test") for name, tensor in each.items()}
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    facts = {
        "whole": whole_here,
        "share": sum(shares) / sum(tensor.numel() for tensor in expected.values()),
        "written": [sum(tensor.numel() for tensor in each.values()) for each in world.gather(part, "the test")],
        "wrong": wrong + sorted(found.keys() ^ expected.keys()),
        "casts": casts_at_the_end(engine, config),
        "activation": 2 * config.train.micro_batch_rows * config.data.row_length * config.cdrmix_model.d_model,
    }
    if world.is_main_process:
        Path(order["where"]).write_text(json.dumps(facts))
    return 0


if __name__ == "__main__":
    exit_worker(main(json.loads(sys.argv[1])))
