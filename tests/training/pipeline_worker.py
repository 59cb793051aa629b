"""One of several processes with stages of a pipeline: gradients that are not finite in one of them, tied tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parent))  # conftest.py keeps it off the path of child processes

from sequence_worker import configured

from cdrmix.data.loader import train_loader
from cdrmix.data.shards import open_shards
from cdrmix.runtime import seed_everything
from cdrmix.training.build import build_loss_model
from cdrmix.training.digests import digest
from cdrmix.training.distributed import join
from cdrmix.training.engine import Engine, make_engine
from cdrmix.training.launch import exit_worker


def poisoned(order: dict[str, Any]) -> int:
    """Writes to `where`, for a number that is not finite in the gradients of each stage at ZeRO 0 and 1, how many
    processes made the update, and how many weights it changed; then both for the step after it."""
    results = {}
    for zero in (0, 1):
        config = configured(order, f"train.zero_stage={zero}", "train.micro_batch_rows=2")
        world = join(config)
        seed_everything(3)
        engine = make_engine(config, build_loss_model(config), world)
        loader = train_loader(config, open_shards(Path(order["shards"])).train, *world.loader_ranks)
        engine.set_learning_rate(1e-2)
        for step, stage in enumerate((0, 1, None)):
            before = {name: parameter.detach().clone() for name, parameter in engine.parameters.items()}
            for _ in engine.passes(loader.micro_batches(step), spoiling(stage)):
                pass
            engine.clip()
            applied = engine.step()
            engine.zero()
            changed = sum(not torch.equal(each, before[name]) for name, each in engine.parameters.items())
            name = f"ZeRO {zero}, " + ("no stage" if stage is None else f"stage {stage}")
            results[f"{name}: applied"] = sum(world.gather(applied, "the test"))
            results[f"{name}: changed"] = sum(world.gather(changed, "the test"))
    if world.is_main_process:
        Path(order["where"]).write_text(json.dumps(results))
    return 0


def tied(order: dict[str, Any]) -> int:
    """Writes to `where` how many digests there are of the tied table in the first and the last stage after steps."""
    config = configured(order, "train.zero_stage=1", "train.reduce_dtype=bf16", "model.tie_embeddings=true")
    world = join(config)
    seed_everything(3)
    engine = make_engine(config, build_loss_model(config), world)
    loader = train_loader(config, open_shards(Path(order["shards"])).train, *world.loader_ranks)
    engine.set_learning_rate(1e-2)
    for step in range(3):
        for _ in engine.passes(loader.micro_batches(step), Engine.forward):
            pass
        engine.clip()
        assert engine.step()
        engine.zero()
    found = {int(each) for each in world.gather(digest(engine.parameters["embedding.weight"]), "the test")}
    if world.is_main_process:
        Path(order["where"]).write_text(json.dumps({"digests": len(found)}))
    return 0


def spoiling(stage: int | None) -> Any:
    """A forward pass after which one bias or weight of a norm of a stage gets a gradient of infinity."""

    def forward(engine: Engine, batch: Any, *, last: bool) -> Any:
        losses = engine.forward(batch, last=last)
        if stage == engine.world.pipeline_stage:
            weight = next(each for name, each in engine.parameters.items() if "mixer_norm" in name)
            losses = losses._replace(total=losses.total + (weight * 0).sum() * torch.inf)
        return losses

    return forward


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    exit_worker({"poisoned": poisoned, "tied": tied}[order["job"]](order))
