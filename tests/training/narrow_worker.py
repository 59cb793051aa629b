"""One process of a bf16 training under test: compares every ZeRO stage with plain PyTorch under autocast."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cdrmix.config.schema import Config
from cdrmix.data.loader import Batch, TrainLoader
from cdrmix.data.shards import open_shards
from cdrmix.ops.weights import compute_weight, is_attached
from cdrmix.runtime import seed_everything
from cdrmix.training import deepspeed_config, stage_a
from cdrmix.training.distributed import DistributedContext, join
from cdrmix.training.engine import Engine, make_engine
from cdrmix.training.launch import exit_worker
from cdrmix.training.optim import make_optimizer, parameter_groups
from cdrmix.training.rendezvous import place

deepspeed_config.PERSISTENCE_THRESHOLD = 0  # so small a model would be kept whole by ZeRO-3
STEPS, ROWS, MICRO = 4, 8, 2
RATE, EPSILON = 0.05, 1e-3  # with AdamW's usual one an update of elements near zero magnifies rounding


def main(order: dict[str, Any]) -> None:
    """Rank 0 writes to `where` what `steps` finds for each of `stages` and both dtypes of the reduction."""
    results = {}
    for stage, reduced in itertools.product(json.loads(order["stages"]), ("fp32", "bf16")):
        results[f"{stage} {reduced}"] = steps(order, stage, reduced)
    if place().rank == 0:
        Path(order["where"]).write_text(json.dumps(results))


def load(order: dict[str, Any], stage: int, reduced: str) -> tuple[Config, DistributedContext]:
    fixed = (
        f"train.zero_stage={stage}",
        f"train.reduce_dtype={reduced}",
        f"train.activation_checkpointing={str(stage in (1, 3)).lower()}",
        "train.precision=bf16",
        f"train.micro_batch_rows={MICRO}",
        "train.gradient_clip=0.3",  # below the norm, so that clipping acts
        f"train.epsilon={EPSILON}",
    )
    config = Config.from_yaml(order["config"], [*fixed, *order["overrides"]])
    return config, join(config)


def batches(order: dict[str, Any], config: Config, step: int, rank: int = 0, size: int = 1) -> list[Batch]:
    split = open_shards(Path(order["shards"])).train
    rows = {"row_length": config.data.row_length, "batch_rows": ROWS, "micro_batch_rows": MICRO, "seed": 5}
    return TrainLoader(split, rank=rank, world_size=size, **rows).micro_batches(step)


def steps(order: dict[str, Any], stage: int, reduced: str) -> dict[str, Any]:
    """Some steps: the largest errors of any rank, whether a second run has the same bits, what moved weights."""
    config, world = load(order, stage, reduced)
    reference = Reference(order, config)
    engine, twin = (new_engine(config, world) for _ in range(2))
    worst = dict.fromkeys(("first loss", "loss", "gradient", "stale"), 0.0)
    moved: list[str] = []
    same = True
    for step in range(STEPS):
        expected = reference.micro_batches(step)
        mine = batches(order, config, step, world.rank, world.size)
        totals = [backward(each, mine, moved if step == 0 and each is engine else None) for each in (engine, twin)]
        same &= totals[0] == totals[1]
        total = world.total(torch.tensor([totals[0]], dtype=torch.float64)).item()
        name = "first loss" if step == 0 else "loss"
        worst[name] = max(worst[name], abs(total / expected - 1))
        if step == 0:
            worst["gradient"] = reference.worst_gradient(engine)
        reference.update()
        for each in (engine, twin):
            each.set_learning_rate(RATE)
            each.clip()
            assert each.step()
            each.zero()
        assert len(set(world.gather(engine.gradient_norm, "the test"))) == 1, "ranks differ about the norm"
        worst["stale"] = max(worst["stale"], stale(engine))
    one, other = engine.weights(), twin.weights()
    same &= all(torch.equal(one[key], other[key]) for key in one)
    twin.load_weights({key: tensor + 1 for key, tensor in one.items()})
    worst["stale"] = max(worst["stale"], stale(twin))
    found = world.gather((worst, same), "the test")
    return {name: max(errors[name] for errors, _ in found) for name in worst} | {
        "same": all(each for _, each in found),
        "attached": sorted(attached(engine)),
        "moved": moved,
    }


def new_engine(config: Config, world: DistributedContext) -> Engine:
    seed_everything(3)
    return make_engine(config, stage_a.build_loss_model(config), world)


def backward(engine: Engine, mine: list[Batch], moved: list[str] | None) -> float:
    """A step's micro-batches; into `moved`, if given, the weights that the last one casts or adds gradients to."""
    total = 0.0
    for batch in mine:
        last = batch is mine[-1]
        with Moves(engine, moved if moved is not None and last and len(mine) > 1 else []):
            losses = engine.forward(batch, last=last)
            engine.backward(losses.total)
        total += losses.total.item()
    return total


class Moves(TorchDispatchMode):
    """Notes the projections of an engine of which a weight is cast, or to whose gradient autograd adds."""

    def __init__(self, engine: Engine, found: list[str]) -> None:
        super().__init__()
        self.found = found
        self.weights = {name: parameter for name, parameter in engine.parameters.items() if is_projection(name)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.add_.Tensor):
            where = args[0].data_ptr()
            for name, weight in self.weights.items():
                # A gradient's cast makes a message of it, while the backward pass goes on.
                moved = weight if func is torch.ops.aten._to_copy.default else weight.grad
                if weight.numel() and moved is not None and moved.data_ptr() == where:
                    self.found.append(f"{func} {name}")
        return func(*args, **(kwargs or {}))


def is_projection(name: str) -> bool:
    *_, module, leaf = name.split(".")
    low_rank = len(leaf) == 2 and leaf[0] in "wavg" and leaf[1] in "12"
    return low_rank or (leaf == "weight" and module in ("receptance", "key", "value", "output", "query", "input"))


def attached(engine: Engine) -> set[str]:
    return {name for name, weight in engine.parameters.items() if is_attached(weight, torch.bfloat16)}


def stale(engine: Engine) -> float:
    """The largest difference between a copy and its weight."""
    held = [engine.parameters[name] for name in attached(engine)]
    pairs = [(compute_weight(weight, torch.bfloat16), weight.detach().bfloat16()) for weight in held]
    return max((float((copy - weight).abs().max()) for copy, weight in pairs), default=0.0)


class Reference:
    """Plain PyTorch under autocast, over the micro-batches of all processes."""

    def __init__(self, order: dict[str, Any], config: Config) -> None:
        seed_everything(3)
        self.order, self.config = order, config
        whole = config.train.model_copy(update={"zero_stage": 0})
        self.model = stage_a.build_loss_model(config.model_copy(update={"train": whole}))
        self.optimizer = make_optimizer(parameter_groups(self.model, config.train), config.train)
        self.largest: dict[str, Tensor] = {}  # of each gradient: the sum over micro-batches of absolute values

    def micro_batches(self, step: int) -> float:
        total = 0.0
        self.largest = {name: torch.zeros_like(parameter) for name, parameter in self.model.named_parameters()}
        summed = {name: torch.zeros_like(parameter) for name, parameter in self.model.named_parameters()}
        for batch in batches(self.order, self.config, step):
            arguments = (batch.ids_BT, batch.targets_BT, batch.weights_BT, batch.documents, batch.token_count)
            with torch.autocast("cpu", torch.bfloat16):
                losses = self.model(*arguments, MICRO / ROWS)
            losses.total.backward()
            total += losses.total.item()
            for name, parameter in self.model.named_parameters():
                self.largest[name] += parameter.grad.abs()
                summed[name] += parameter.grad
                parameter.grad = None
        for name, parameter in self.model.named_parameters():
            parameter.grad = summed[name]
        return total

    def worst_gradient(self, engine: Engine) -> float:
        from deepspeed.utils import safe_get_full_grad

        worst = 0.0
        for name, plain in self.model.named_parameters():
            parameter = engine.parameters[name.removeprefix("language_model.")]
            found = parameter.grad if engine.stage == 0 else safe_get_full_grad(parameter)
            scale = self.largest[name].max().item()
            worst = max(worst, (found - plain.grad).abs().max().item() / scale if scale else found.abs().max().item())
        return worst

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.gradient_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * group["multiplier"]
        self.optimizer.step()
        self.optimizer.zero_grad()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    exit_worker(0)
