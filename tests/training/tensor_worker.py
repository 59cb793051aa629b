"""One of several processes that divide every layer: their gradients against those of the whole model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parent))  # conftest.py keeps it off the path of child processes

from sequence_worker import configured, dropped, engines, perturbed, run, starts
from worker import relative

from cdrmix.data.batch import Batch
from cdrmix.model.tensor_parallel import Divisible, TensorGroup, cut_of
from cdrmix.training.build import build_loss_model
from cdrmix.training.distributed import join
from cdrmix.training.launch import exit_worker
from cdrmix.training.tensor_groups import TensorGroups


def uncopied(self: TensorGroup, x: torch.Tensor) -> torch.Tensor:
    return x


def uncopied_parameters(self: Divisible, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return parameters


GUARDS: dict[str | None, tuple[type, str, Callable[..., Any]]] = {
    "copied": (TensorGroup, "copied", uncopied),
    "copied parameters": (Divisible, "copied_parameters", uncopied_parameters),
}


def gathered(found: dict[str, torch.Tensor], model: Any, size: int) -> dict[str, torch.Tensor]:
    """The tensors of `run` whole: those of divided parameters from all processes."""
    parameters = dict(model.named_parameters())
    whole = {}
    for name, mine in found.items():
        cut = cut_of(parameters[name]) if name in parameters else None
        if cut is None:
            whole[name] = mine
            continue
        shares = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(shares, mine.contiguous())
        whole[name] = cut.whole(shares)
    return whole


def worst(order: dict[str, Any], layout: list[int], dtype: torch.dtype, guard: str | None = None) -> dict[str, float]:
    """The relative errors of the loss, the counts and every gradient of packed rows."""
    config, whole = configured(order), configured(order, "train.tensor_parallel=1")
    join(config)
    rows, length = 2, config.data.row_length
    generator = torch.Generator().manual_seed(11)
    ids, targets = torch.randint(0, config.cdrmix_model.vocab_size, (2, rows, length), generator=generator)
    weights = torch.rand(rows, length, generator=generator).to(dtype)
    bounds = sorted({0, *layout, *range(0, rows * length + 1, length)})
    batch = Batch(ids, targets, weights, torch.tensor(bounds, dtype=torch.int32), 0, float(weights.sum()))
    plain = perturbed(whole, dtype)
    expected = run(plain, batch, 1.0)
    divided = build_loss_model(config).to(dtype)
    group = TensorGroups.of(divided)
    assert group is not None
    with torch.no_grad():
        for mine, theirs in zip(divided.parameters(), plain.parameters(), strict=True):
            cut = cut_of(mine)
            mine.copy_(theirs if cut is None else cut.share(theirs, group.rank, group.size))
    with dropped(GUARDS.get(guard)):
        found = gathered(run(divided, batch, 1.0), divided, group.size)
    return {name: relative(found[name], expected[name]) for name in expected}


def shares(order: dict[str, Any]) -> int:
    """Writes to `where` the largest error of each layout of documents, and those with each guard dropped."""
    config = configured(order)
    world = join(config)
    layouts = starts(2, config.data.row_length, 2)
    results = {name: max(worst(order, layout, torch.float64).values()) for name, layout in layouts.items()}
    results |= {f"without {guard}": max(worst(order, [5], torch.float64, guard).values()) for guard in GUARDS}
    everyone = world.gather(results)
    if world.is_main_process:
        Path(order["where"]).write_text(json.dumps({name: max(each[name] for each in everyone) for name in results}))
    return 0


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    exit_worker({"shares": shares, "engines": engines}[order["job"]](order))
