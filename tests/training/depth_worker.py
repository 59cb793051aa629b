"""One process of a training whose branches skip tokens: several processes against one, saved biases, and resuming."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.append(str(Path(__file__).parent))  # conftest.py keeps it off the path of child processes

from saved_state import FINGERPRINTS
from worker import relative, resumes, same_bits

from cdrmix.config.schema import Config
from cdrmix.data.loader import TrainLoader
from cdrmix.data.shards import open_shards
from cdrmix.inference.checkpoints import newest_whole_checkpoint, read_weights
from cdrmix.model.depth import DepthRouter, move_biases
from cdrmix.model.loss import Losses
from cdrmix.runtime import seed_everything
from cdrmix.training import owners
from cdrmix.training.build import build_loss_model
from cdrmix.training.checkpoint import Progress, load_checkpoint, save_checkpoint
from cdrmix.training.distributed import DistributedContext, join
from cdrmix.training.engine import make_engine
from cdrmix.training.launch import exit_worker
from cdrmix.training.objective import Outcome, StepAccumulator, StepTotals
from cdrmix.training.optim import make_optimizer, parameter_groups
from cdrmix.training.rendezvous import place

owners.SMALL = 200  # the model is so small that every process would update everything


def configured(order: dict[str, Any], settings: list[str]) -> Config:
    fixed = (
        "train.micro_batch_rows=2",
        "train.gradient_clip=0.3",  # below the norm, so that clipping acts
        "train.epsilon=0.01",  # with AdamW's usual one an update of elements near zero magnifies rounding
    )
    return Config.from_yaml(order["config"], [*fixed, *order["overrides"], *settings])


def routers(model: nn.Module) -> list[DepthRouter]:
    return [module for module in model.modules() if isinstance(module, DepthRouter)]


def outcome(losses: Losses) -> Outcome:
    return Outcome(losses.total, losses.total.new_zeros(0), losses.router, losses.depth)


def moved(model: nn.Module, totals: StepTotals) -> None:
    move_biases(model, totals.depth.threshold_G, totals.depth.lowest_G, 1.0, 0.5)


@contextmanager
def keeping_nothing(model: nn.Module, nothing: bool) -> Iterator[None]:
    """In this context no branch of the model keeps a token, if `nothing`."""
    biases = [router.bias.clone() for router in routers(model)]
    for router in routers(model) if nothing else ():
        router.bias.fill_(-100.0)
    yield
    for router, bias in zip(routers(model), biases, strict=True):
        router.bias.copy_(bias)


def steps(order: dict[str, Any], settings: list[str], save: Path) -> dict[str, float]:
    """Three steps of the engine against plain PyTorch in one process: the largest errors of a process.

    In the second step the last process keeps no token. Both sides have the weights and biases of a few steps' move, so
    that every branch keeps some tokens and skips others.
    """
    rank, size, *_ = place()
    config = configured(order, settings)
    world, alone = join(config), DistributedContext(0, 1, 0, torch.device("cpu"))
    split = open_shards(Path(order["shards"])).train
    rows = {"row_length": config.data.row_length, "batch_rows": 8, "micro_batch_rows": 2, "seed": 5}
    everyone, mine = TrainLoader(split, **rows), TrainLoader(split, rank=rank, world_size=size, **rows)
    seed_everything(3)
    whole = [each for each in settings if not any(key in each for key in ("expert_parallel", "compile", "zero_stage"))]
    plain = build_loss_model(configured(order, whole))
    with torch.no_grad():  # outputs start at zero, which would hide half of the gradients
        for parameter in plain.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.02)
        for router in routers(plain):
            router.weight.normal_()
            router.bias.fill_(0.3)
    start = {name: value.clone() for name, value in plain.language_model.state_dict().items()}
    optimizer = make_optimizer(parameter_groups(plain, config.train), config.train)
    engine = make_engine(config, build_loss_model(config), world)
    engine.load_weights(start if rank == 0 else {})
    found: dict[str, float] = {"loss": 0.0, "norm": 0.0, "share": 0.0}
    for step in range(3):
        expected = StepAccumulator(alone, (), counts_routing=False)
        batches = everyone.micro_batches(step)
        owner = everyone_owner(batches, mine_of(split, rows, size, step))
        for batch, its_rank in zip(batches, owner, strict=True):
            with keeping_nothing(plain, step == 1 and its_rank == size - 1):
                arguments = (batch.ids_BT, batch.targets_BT, batch.weights_BT, batch.documents, batch.token_count)
                losses = plain(*arguments, 1 / 4)
                losses.total.backward()
            expected.add(outcome(losses))
        told = StepAccumulator(world, (), counts_routing=False)
        here = mine.micro_batches(step)
        for batch in here:
            with keeping_nothing(engine.module, step == 1 and rank == size - 1):
                losses = engine.forward(batch, last=batch is here[-1])
                engine.backward(losses.total)
            told.add(outcome(losses))
        norm = nn.utils.clip_grad_norm_(plain.parameters(), config.train.gradient_clip).item()
        assert norm > config.train.gradient_clip
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * group["multiplier"]
        optimizer.step()
        optimizer.zero_grad()
        engine.set_learning_rate(1e-2)
        engine.clip()
        assert engine.step()
        engine.zero()
        wanted, totals = expected.total(False, False, None), told.total(False, False, None)
        moved(plain, wanted)
        moved(engine.module, totals)
        assert 0.2 < wanted.depth.share_G.min() <= wanted.depth.share_G.max() < 0.95, wanted.depth
        found["loss"] = max(found["loss"], abs(totals.loss / wanted.loss - 1))
        found["norm"] = max(found["norm"], abs(engine.gradient_norm / norm - 1))
        found["share"] = max(found["share"], (totals.depth.share_G - wanted.depth.share_G).abs().max().item())
    reference, weights = plain.language_model.state_dict(), engine.weights()
    names = dict(plain.language_model.named_parameters())
    biases = [name for name in reference if name not in names and "depth_routers" in name]
    assert not weights or set(reference) == set(weights)
    found["update"] = max(
        (apart(weights[name], reference[name], start[name]) for name in names if weights), default=0.0
    )
    found["bias"] = max((relative(weights[name], reference[name]) for name in biases if weights), default=0.0)
    mine_now = torch.cat([router.bias for router in routers(engine.module)]).tolist()
    assert all(each == mine_now for each in world.gather(mine_now, "the test")), "processes differ about the biases"
    save_checkpoint(engine, save, Progress(step=3), config, FINGERPRINTS).finish()
    seed_everything(4)
    other = make_engine(config, build_loss_model(config), world)
    checkpoint = newest_whole_checkpoint(save)
    assert checkpoint is not None
    load_checkpoint(other, checkpoint, config, FINGERPRINTS)
    assert same_bits(world, read_weights(checkpoint), other.weights())
    assert torch.cat([router.bias for router in routers(other.module)]).tolist() == mine_now
    return {name: max(world.gather(error, "the test")) for name, error in found.items()}


def apart(found: torch.Tensor, expected: torch.Tensor, start: torch.Tensor) -> float:
    """The largest error, relative to the largest update, beyond what rounding the weights in three steps explains: half
    a unit of the last place of the largest weight in each step on each side."""
    rounding = 3 * 2 * 2**-24 * float(expected.abs().max())
    error = max(float((found - expected).abs().max()) - rounding, 0.0)
    return error / (float((expected - start).abs().max()) or 1.0)


def mine_of(split: Any, rows: dict[str, Any], size: int, step: int) -> list[list[Any]]:
    """The micro-batches of each process."""
    return [TrainLoader(split, rank=rank, world_size=size, **rows).micro_batches(step) for rank in range(size)]


def everyone_owner(batches: list[Any], of_ranks: list[list[Any]]) -> list[int]:
    """The process that has each of these micro-batches."""
    return [
        next(rank for rank, its in enumerate(of_ranks) if any(torch.equal(batch.ids_BT, each.ids_BT) for each in its))
        for batch in batches
    ]


def depth_resumes(order: dict[str, Any], settings: list[str], where: Path) -> bool:
    """`resumes` after tokens were skipped."""
    return resumes(order, [*order["overrides"], *json.loads(order["trained"]), *settings], where, stop=8)


def main(order: dict[str, Any]) -> None:
    rank = place().rank
    folder = Path(order["folder"])
    results: dict[str, Any] = {}
    for name, job in (("cases", steps), ("resumed", depth_resumes)):
        for number, settings in enumerate(json.loads(order[name])):
            results[f"{name} {' '.join(settings)}"] = job(order, settings, folder / f"{name}-{number}")
            if rank == 0:  # now, so that those before a failure can be read
                Path(order["where"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    exit_worker(0)
