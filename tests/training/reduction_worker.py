"""One process of a reduction under test: a toy of plain PyTorch, and engines that overlap it or do not."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cdrmix import ops
from cdrmix.config.schema import Config
from cdrmix.data.loader import TrainLoader
from cdrmix.data.shards import open_shards
from cdrmix.ops import weights as compute_weights
from cdrmix.runtime import seed_everything
from cdrmix.training import deepspeed_config
from cdrmix.training import engine as engine_module
from cdrmix.training.build import build_loss_model
from cdrmix.training.distributed import join
from cdrmix.training.engine import Engine, make_engine
from cdrmix.training.launch import exit_worker
from cdrmix.training.reduction import GradientReduction, ReplicatedParameters
from cdrmix.training.rendezvous import place


def toy(order: dict[str, Any]) -> dict[str, Any]:
    """Whole numbers, whose sums are exact: what this rank holds after a reduction, against its formula.

    `twice` is a projection with an attached copy that is used two times, `alone` takes part in rank 0 only, `never`
    nowhere. They are named in an order in which these two come last, so that the others leave before them.
    """
    rank, size, *_ = place()
    join(Config.from_yaml(order["config"], []))  # settles threads and the process group
    ranks = sum(range(1, size + 1))
    # A micro-batch's gradient, over rank + 1. The outer product gives every element of `twice` 5; the inner one gives
    # those of row i what the outer one has of column i, over its 4 rows: 4, and 8 where the input reads it twice.
    reads = torch.tensor([8.0, 4.0, 4.0, 4.0])
    expected = [torch.zeros(5), torch.full((5,), 2.0), torch.full((5,), 2 * ranks * float(reads.sum()))]
    expected.append((2 * ranks * (5.0 + reads))[:, None].expand(4, 5).reshape(-1))
    results = {}
    for part, dtype, overlap in itertools.product((None, 12), (torch.float32, torch.bfloat16), (True, False)):
        never, alone, early = (nn.Parameter(torch.ones(5)) for _ in range(3))
        twice = nn.Parameter(torch.ones(4, 5))
        compute_weights.attach([twice], torch.bfloat16, add_gradients=True)
        parameters = [never, alone, early, twice]
        shared = [ReplicatedParameters(parameters, dist.group.WORLD, part)]
        reduction = GradientReduction(parameters, shared, dtype, most=7, overlap=overlap)
        for last in (False, True):
            if last:
                reduction.begin()
            with torch.autocast("cpu", torch.bfloat16):
                inner = ops.linear(early[None] * (rank + 1), twice)
                total = ops.linear(torch.cat([inner, inner[:, :1]], 1), twice).sum()
            (total + alone.sum() if rank == 0 else total).backward()
        left = reduction._next
        reduction.end()
        found = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])
        wanted = slice(None) if part is None else slice(part * rank, part * (rank + 1))
        error = (found[wanted] - torch.cat(expected)[wanted]).abs().max().item()
        results[f"{part} {dtype} {overlap}"] = [error, left, len(reduction._buckets)]
    return results


def engines(order: dict[str, Any]) -> dict[str, Any]:
    """Two engines a case, one without overlap: whether bits are equal, and what had left when backward returned."""
    results = {}
    for stage, precision, experts, reduced in itertools.product(
        (0, 1), ("fp32", "bf16"), (1, 2), json.loads(order["reduced"])
    ):
        found = [run_engine(order, overlap, stage, precision, experts, reduced) for overlap in (True, False)]
        (weights, left, buckets), (others, none_left, _) = found
        results[f"{stage} {precision} {experts} {reduced}"] = {
            "same": all(torch.equal(weights[name], others[name]) for name in weights),
            "left": left,
            "none left": none_left,
            "buckets": buckets,
        }
    return results


def run_engine(
    order: dict[str, Any], overlap: bool, stage: int, precision: str, experts: int, reduced: str
) -> tuple[dict[str, Tensor], int, int]:
    rank, size, *_ = place()
    overrides = [f"train.zero_stage={stage}", f"train.precision={precision}", f"train.expert_parallel={experts}"]
    overrides += [f"train.reduce_dtype={reduced}", f"train.micro_batch_rows={4 // size}", *order["overrides"]]
    config = Config.from_yaml(order["config"], overrides)
    world = join(config)
    engine_module.GradientReduction = functools.partial(GradientReduction, overlap=overlap)  # type: ignore[misc]
    engine_module.BUCKET = deepspeed_config.BUCKET = 1000
    seed_everything(3)
    engine: Engine = make_engine(config, build_loss_model(config), world)
    reduction = engine._reduction
    assert reduction is not None
    left = []
    end = reduction.end

    def ending() -> None:
        left.append(reduction._next)
        end()

    reduction.end = ending  # type: ignore[method-assign]
    loader = TrainLoader(
        open_shards(Path(order["shards"])).train,
        row_length=config.data.row_length,
        batch_rows=8,
        micro_batch_rows=4 // size,
        seed=5,
        rank=rank,
        world_size=size,
    )
    for step in range(2):
        batches = loader.micro_batches(step)
        assert len(batches) == 2
        for batch in batches:
            engine.backward(engine.forward(batch, last=batch is batches[-1]).total)
        engine.set_learning_rate(1e-2)
        engine.clip()
        assert engine.step()
        engine.zero()
    assert len(left) == 2, "a reduction an update"
    return engine.weights(), min(left), len(reduction._buckets)


def main(order: dict[str, Any]) -> int:
    results = toy(order) if order["job"] == "toy" else engines(order)
    Path(f"{order['where']}-{place().rank}").write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    exit_worker(main(json.loads(sys.argv[1])))
