"""One process of a training with Muon under test: several processes against one, their checkpoints, and resuming."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.append(str(Path(__file__).parent))  # conftest.py keeps it off the path of child processes

from saved_state import FINGERPRINTS, loads_the_state, optimizer_state
from worker import relative, resumes, same_bits

from cdrmix.config.schema import Config
from cdrmix.data.loader import TrainLoader
from cdrmix.data.shards import open_shards
from cdrmix.inference.checkpoints import newest_whole_checkpoint, read_weights
from cdrmix.runtime import seed_everything
from cdrmix.training import owners
from cdrmix.training.build import build_loss_model
from cdrmix.training.checkpoint import Progress, save_checkpoint
from cdrmix.training.distributed import join
from cdrmix.training.engine import make_engine
from cdrmix.training.launch import exit_worker
from cdrmix.training.optim import make_optimizer, parameter_groups
from cdrmix.training.rendezvous import place

owners.SMALL = 200  # the model is so small that every process would update everything


def configured(order: dict[str, Any], parallel: int) -> Config:
    fixed = (
        "train.optimizer=muon",
        "train.zero_stage=auto",
        f"train.expert_parallel={parallel}",
        "train.micro_batch_rows=2",
        "train.gradient_clip=0.3",  # below the norm, so that clipping acts
        "train.epsilon=0.01",  # with AdamW's usual one an update of elements near zero magnifies rounding
        "train.groups={embedding: {rate: 3.0, schedule: linear}}",
    )
    return Config.from_yaml(order["config"], [*fixed, *order["overrides"]])


def steps(order: dict[str, Any], parallel: int, save: Path) -> dict[str, float]:
    """Three steps of the engine against plain PyTorch in one process: the largest errors, relative to the updates."""
    rank, size, *_ = place()
    config = configured(order, parallel)
    world = join(config)
    split = open_shards(Path(order["shards"])).train
    rows = {"row_length": config.data.row_length, "batch_rows": 8, "micro_batch_rows": 2, "seed": 5}
    everyone, mine = TrainLoader(split, **rows), TrainLoader(split, rank=rank, world_size=size, **rows)
    seed_everything(3)
    plain = build_loss_model(configured(order, 1))
    with torch.no_grad():  # outputs start at zero, which would hide half of the gradients
        for parameter in plain.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.02)
    start = {name: value.clone() for name, value in plain.language_model.state_dict().items()}
    optimizer = make_optimizer(parameter_groups(plain, config.train), config.train)
    engine = make_engine(config, build_loss_model(config), world)
    engine.load_weights(start if rank == 0 else {})
    rates = {"embedding": 2e-2}
    for step in range(3):
        for batch in everyone.micro_batches(step):
            arguments = (batch.ids_BT, batch.targets_BT, batch.weights_BT, batch.documents, batch.token_count)
            plain(*arguments, 1 / 4).total.backward()
        batches = mine.micro_batches(step)
        for batch in batches:
            engine.backward(engine.forward(batch, last=batch is batches[-1]).total)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), config.train.gradient_clip).item()
        assert norm > config.train.gradient_clip
        for group in optimizer.param_groups:
            group["lr"] = rates.get(group["schedule"], 1e-2) * group["multiplier"]
        optimizer.step()
        optimizer.zero_grad()
        engine.set_learning_rate(1e-2, rates)
        engine.clip()
        assert engine.step()
        engine.zero()
    reference, found = dict(plain.language_model.named_parameters()), engine.weights()
    errors = {
        name: relative(found[name] - start[name], reference[name].detach() - start[name])
        for name in reference
        if name in found
    }
    held = sum(value.numel() for slots in engine.optimizer.state.values() for value in slots.values())
    state = optimizer_state(save_checkpoint(engine, save, Progress(step=3), config, FINGERPRINTS).finish())
    share = held / sum(value.numel() for value in state.values())
    assert {name.rpartition("/")[0] for name in state} == set(reference)
    return {"update": max(errors.values(), default=0.0), "share": max(world.gather(share, "the test"))}


def load(order: dict[str, Any], saved: Path, parallel: int) -> bool:
    """Whether a checkpoint of another number of processes has the same bits in these."""
    config = configured(order, parallel)
    world = join(config)
    checkpoint = newest_whole_checkpoint(saved)
    assert checkpoint is not None
    seed_everything(4)
    engine = make_engine(config, build_loss_model(config), world)
    same = loads_the_state(engine, checkpoint, config)
    return all(world.gather(same and same_bits(world, read_weights(checkpoint), engine.weights()), "the test"))


def muon_resumes(order: dict[str, Any], parallel: int, where: Path) -> bool:
    """`resumes` with Muon."""
    overrides = ["train.optimizer=muon", "train.zero_stage=auto", f"train.expert_parallel={parallel}"]
    overrides += ["train.micro_batch_rows=2", "train.steps=5", *order["overrides"]]
    return resumes(order, overrides, where, stop=3)


def main(order: dict[str, Any]) -> None:
    rank, size, *_ = place()
    folder = Path(order["folder"])
    results: dict[str, Any] = {}
    for parallel in json.loads(order["parallel"]):
        results[f"steps {parallel}"] = steps(order, parallel, folder / f"saved-{size}-{parallel}")
        if order.get("resume"):
            results[f"resumed {parallel}"] = muon_resumes(order, parallel, folder / f"runs-{size}-{parallel}")
    for saved, parallel in json.loads(order["load"]):
        results[f"loaded {saved}"] = load(order, folder / saved, parallel)
    if rank == 0:
        Path(order["where"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    exit_worker(0)
