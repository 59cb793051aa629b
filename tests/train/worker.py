"""One process of a training under test, told by a JSON argument what to do: train, or compare gradients."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cdrmix.config.load import load_config
from cdrmix.config.schema import Train
from cdrmix.data.loader import TrainLoader
from cdrmix.data.shards import open_shards
from cdrmix.errors import CdrmixError
from cdrmix.train import engine as engine_module
from cdrmix.train import stage_a
from cdrmix.train.engine import make_engine
from cdrmix.train.optim import LossScale, make_optimizer, parameter_groups
from cdrmix.train.parallel import join, rank_size_local_rank, seed_everything
from cdrmix.train.run import RunFolder
from cdrmix.train.schedule import learning_rate

# The model here is so small that ZeRO-3 would keep every parameter whole, and prove nothing about released ones.
engine_module.PERSISTENCE_THRESHOLD = 0


def train(order: dict[str, Any]) -> int:
    """Trains in the run folder `where`, which rank 0 makes if need be; `at`: see `act_before`."""
    if "at" in order and rank_size_local_rank()[0] == 0:
        act_before(order["at"])
    return train_in(Path(order["where"]), order, order["overrides"], resume=order.get("resume"))


def train_in(where: Path, order: dict[str, Any], overrides: list[str], *, resume: str | None = None) -> int:
    config = load_config(order["config"], overrides)
    rank = rank_size_local_rank()[0]
    if rank == 0 and not where.exists():
        RunFolder.create(config).path.rename(where)
    join(config).barrier()
    run = RunFolder.open(where, writes=rank == 0)
    try:
        print(stage_a.train(config, run, open_shards(Path(order["shards"])), resume=resume, console=False))
    except CdrmixError as error:
        print(error)
        return error.exit_code
    return 0


class BrokenOff(Exception):
    """Ends a training in the middle, in a process that lives on."""


def act_before(order: str) -> None:
    """ "3:SIGTERM" sends this process a signal before the step that follows 3 finished ones; "3:stop" raises."""
    finished, _, act = order.partition(":")

    def act_then_answer(train: Train, step: int) -> float:
        if step == int(finished):
            stage_a.learning_rate = learning_rate
            if act == "stop":
                raise BrokenOff
            os.kill(os.getpid(), signal.Signals[act])
        return learning_rate(train, step)

    stage_a.learning_rate = act_then_answer


def repeat(order: dict[str, Any]) -> int:
    """For each ZeRO stage: one run straight, one broken off and resumed; then one that a signal to rank 0 stops."""
    where = Path(order["where"])
    where.mkdir(exist_ok=True)
    for stage in (0, 2, 3):
        overrides = [*order["overrides"], f"train.zero_stage={stage}"]
        assert train_in(where / f"straight{stage}", order, overrides) == 0
        act_before("3:stop")
        try:
            train_in(where / f"broken{stage}", order, overrides)
        except BrokenOff:
            assert train_in(where / f"broken{stage}", order, overrides, resume="auto") == 0
    if rank_size_local_rank()[0] == 0:
        act_before("2:SIGTERM")
    return train_in(where / "stopped", order, order["overrides"])


def gradients(order: dict[str, Any]) -> int:
    """Holds the engine against plain PyTorch for every ZeRO stage, accumulation and activation checkpointing.

    Rank 0 writes `where`: for each combination the largest errors, relative to the largest element.
    """
    results = {}
    for stage, accumulation, checkpointing in itertools.product((0, 1, 2, 3), (1, 2), (False, True)):
        overrides = [f"train.zero_stage={stage}", f"train.activation_checkpointing={str(checkpointing).lower()}"]
        results[f"{stage} {accumulation} {checkpointing}"] = compare(order, overrides, accumulation)
    for stage in (0, 1, 2, 3):
        results[f"scaled {stage}"] = compare_scaled(order, stage)
    if rank_size_local_rank()[0] == 0:
        Path(order["where"]).write_text(json.dumps(results))
    return 0


def compare_scaled(order: dict[str, Any], stage: int) -> dict[str, float]:
    """A step with a loss scale against one without, and what is left of the weights after an overflow: all errors."""
    rank, size, _ = rank_size_local_rank()
    config = load_config(order["config"], [f"train.zero_stage={stage}", f"train.micro_batch_rows={8 // size}"])
    world = join(config)
    loader = TrainLoader(
        open_shards(Path(order["shards"])).train,
        row_length=config.data.row_length,
        batch_rows=8,
        micro_batch_rows=8 // size,
        seed=5,
        rank=rank,
        world=size,
    )
    (batch,) = loader.micro_batches(0)
    norms = []
    for scale in (1.0, 2.0**10, 2.0**200):
        seed_everything(3)
        engine = make_engine(config, stage_a.build_loss_model(config), world)
        engine.loss_scale = LossScale(scale > 1, initial=scale)
        before = {name: weight.clone() for name, weight in engine.weights().items()}
        engine.backward(engine.forward(batch, last=True).total)
        engine.clip()
        applied = engine.step()
        norms.append(engine.gradient_norm)
    assert not applied
    assert not math.isfinite(norms[2])
    assert engine.loss_scale.value == 2.0**199
    engine.zero()
    left = max((relative(weight, before[name]) for name, weight in engine.weights().items()), default=0.0)
    # The refused step leaves nothing behind: with a scale that fits, the next one is as if it were the first.
    engine.loss_scale.value = 2.0**10
    engine.backward(engine.forward(batch, last=True).total)
    engine.clip()
    assert engine.step()
    return {
        "norm": abs(norms[1] / norms[0] - 1),
        "left": left,
        "after": abs(engine.gradient_norm / norms[0] - 1),
    }


def compare(order: dict[str, Any], overrides: list[str], accumulation: int) -> dict[str, float]:
    rank, size, _ = rank_size_local_rank()
    overrides += [f"train.micro_batch_rows={8 // accumulation // size}", *order["overrides"]]
    config = load_config(order["config"], overrides)
    world = join(config)
    from deepspeed.utils import safe_get_full_grad  # after join, which tells it the accelerator

    split = open_shards(Path(order["shards"])).train
    rows = {"row_length": config.data.row_length, "batch_rows": 8, "seed": 5}

    seed_everything(3)
    plain = stage_a.build_loss_model(load_config(order["config"], order["overrides"]))
    # The routers' losses are means over a micro-batch, so plain PyTorch sees the same micro-batches, of all ranks.
    for batch in TrainLoader(split, micro_batch_rows=8 // accumulation // size, **rows).micro_batches(0):
        plain(
            batch.ids_BT,
            batch.targets_BT,
            batch.weights_BT,
            batch.cu_seqlens_N,
            batch.token_count,
            1 / accumulation / size,
        ).total.backward()
    expected = {name: parameter.grad.clone() for name, parameter in plain.named_parameters()}
    norm = nn.utils.clip_grad_norm_(plain.parameters(), config.train.gradient_clip).item()
    adamw = make_optimizer(parameter_groups(plain, config.train), config.train)
    for group in adamw.param_groups:
        group["lr"] = 1e-2 * group["multiplier"]
    adamw.step()

    seed_everything(3)
    model = stage_a.build_loss_model(config)
    engine = make_engine(config, model, world)
    mine = TrainLoader(split, micro_batch_rows=8 // accumulation // size, rank=rank, world=size, **rows)
    batches = mine.micro_batches(0)
    assert len(batches) == accumulation
    engine.set_learning_rate(1e-2)
    for batch in batches:
        engine.backward(engine.forward(batch, last=batch is batches[-1]).total)
    if config.train.zero_stage == 3 and size > 1:
        assert all(parameter.numel() == 0 for parameter in model.parameters()), "ZeRO-3 holds a parameter whole"
    worst = 0.0
    for name, parameter in model.named_parameters():
        gradient = parameter.grad if config.train.zero_stage == 0 else safe_get_full_grad(parameter)
        worst = max(worst, relative(gradient, expected[name]))
    engine.clip()
    assert engine.step()
    engine.zero()
    weights = engine.weights()
    reference = dict(plain.language_model.named_parameters())
    moved = max((relative(weights[name], reference[name].detach()) for name in weights), default=0.0)
    return {"gradient": worst, "norm": abs(engine.gradient_norm / norm - 1), "weights": moved}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    scale = expected.abs().max().item()
    return (found - expected).abs().max().item() / scale if scale else found.abs().max().item()


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    sys.exit({"train": train, "repeat": repeat, "gradients": gradients}[order["job"]](order))
