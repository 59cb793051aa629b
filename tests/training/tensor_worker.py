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

from sequence_worker import configured, dropped, engines, packed, perturbed, run, starts
from worker import relative

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


def shares(order: dict[str, Any]) -> int:
    """Writes to `where` the largest relative error of the loss, the counts and the gradients in float64 in any process,
    with one document in a row, with filling and with many, and with each guard dropped."""
    config, whole = configured(order), configured(order, "train.tensor_parallel=1")
    world, results = join(config), {}

    def compare(layout: list[int], guards: dict[str, str | None], tokens: tuple[int, int] | None = None) -> None:
        batch = packed(config, layout, tokens)
        plain = perturbed(whole, torch.float64)
        expected = run(plain, batch, 1.0)
        divided = build_loss_model(config).double()
        group = TensorGroups.of(divided)
        assert group is not None
        with torch.no_grad():
            for mine, theirs in zip(divided.parameters(), plain.parameters(), strict=True):
                cut = cut_of(mine)
                mine.copy_(theirs if cut is None else cut.share(theirs, group.rank, group.size))
        for name, guard in guards.items():
            with dropped(GUARDS.get(guard)):
                found = gathered(run(divided, batch, 1.0), divided, group.size)
            results[name] = max(
                world.gather(max(relative(found[each], expected[each]) for each in expected), "the test"), default=0
            )

    layouts = starts(2, config.data.row_length, 2)
    compare(layouts["one document a row"], {"one document a row": None})
    compare([3], {"filling": None}, (config.data.row_length - 3, 5))
    compare(layouts["many"], {"many": None} | {f"without {guard}": guard for guard in GUARDS})
    if world.is_main_process:
        Path(order["where"]).write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    exit_worker({"shares": shares, "engines": engines}[order["job"]](order))
