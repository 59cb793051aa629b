"""One of the processes of a training with faults: told by a JSON argument, as worker.py."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # conftest.py keeps it off the path of child processes

from worker import act_before, train_in

from cdrmix.data.batch import Batch
from cdrmix.inference.checkpoints import list_checkpoints
from cdrmix.training.engine import Engine
from cdrmix.training.faults import Skips
from cdrmix.training.launch import exit_worker
from cdrmix.training.objective import Outcome
from cdrmix.training.rendezvous import place
from cdrmix.training.stage_a import Pretraining


def hang(order: dict[str, Any]) -> int:
    """Trains, which loads the kernels, and once more, where rank 0 does not end its fourth step."""
    where = Path(order["where"])
    where.mkdir(exist_ok=True)
    assert train_in(where / "straight", order, order["overrides"]) == 0
    if place().rank == 0:
        act_before("3:hang")
    return train_in(where / "hangs", order, [*order["overrides"], "train.hang_timeout=8"])


def skips(order: dict[str, Any]) -> int:
    """For each ZeRO stage: a NaN in rank 1 at step 3, and a finite loss at step 4 that counts as a spike.

    Rank 0 writes `where`: for each stage which files with tensors have changed from each step to the next.
    """
    where, rank = Path(order["where"]), place().rank
    where.mkdir(exist_ok=True)
    forward, reason = Pretraining.forward, Skips.reason
    asked: list[float] = []

    def broken(self: Pretraining, engine: Engine, micro_batch: Batch, *, last: bool) -> Outcome:
        outcome = forward(self, engine, micro_batch, last=last)
        return outcome._replace(total=outcome.total * math.nan) if len(asked) == 2 and rank == 1 else outcome

    def judged(self: Skips, loss: float) -> str | None:
        asked.append(loss)
        return "it is the fourth" if len(asked) == 4 else reason(self, loss)

    Pretraining.forward, Skips.reason = broken, judged
    changed: dict[str, list[list[str]]] = {}
    for name in ("0", "1", "2", "3", "2-optimizer", "3-all"):
        asked.clear()
        stage, _, offload = name.partition("-")
        overrides = [*order["overrides"], f"train.zero_stage={stage}", f"train.offload={offload or 'none'}"]
        more = ["train.steps=5", "train.checkpoint_every=1", "train.keep_last=9", "train.skip.nonfinite=1"]
        assert train_in(where / name, order, [*overrides, *more]) == 0
        steps = [
            {path.name: path.read_bytes() for path in sorted(checkpoint.glob("*.safetensors"))}
            for checkpoint in list_checkpoints(where / name / "checkpoints")
        ]
        changed[name] = [
            [file for file in before if before[file] != after[file]] for before, after in itertools.pairwise(steps)
        ]
    if rank == 0:
        (where / "changed.json").write_text(json.dumps(changed))
    return 0


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    exit_worker({"hang": hang, "skips": skips}[order["job"]](order))
