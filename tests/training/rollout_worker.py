"""One process of a run with both stages, told by a JSON argument: trains, and writes facts about rollouts to a file."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # conftest.py keeps it off the path of child processes

from worker import act_before

from cdrmix.config.schema import Config
from cdrmix.data.shards import open_shards
from cdrmix.inference.checkpoints import newest_whole_checkpoint
from cdrmix.model.language_model import LanguageModel
from cdrmix.reason.stage_b import spans, train_stage_b
from cdrmix.run_folder import RunFolder
from cdrmix.training import deepspeed_config, stage_a
from cdrmix.training.distributed import join
from cdrmix.training.launch import exit_worker

# The model here is so small that ZeRO-3 would keep every parameter whole, and prove nothing about released ones.
deepspeed_config.PERSISTENCE_THRESHOLD = 0
deepspeed_config.BUCKET = 3000  # elements: with all gradients in one message their order would not matter


def main(order: dict[str, Any]) -> int:
    """Trains in the run folder `where`, which rank 0 makes if need be. start: a run to copy. at: as of
    worker.act_before, in the first phase that has steps left.

    Rank 0 prints for each process how many forward passes of the language model it has made in stage B, and how many of
    them read one token.
    """
    config = Config.from_yaml(order["config"], order["overrides"])
    where = Path(order["where"])
    world = join(config)
    if world.is_main_process and not where.exists():
        if "start" in order:
            shutil.copytree(order["start"], where)
        else:
            RunFolder.create(config).path.rename(where)
    world.barrier()
    run = RunFolder.open(where, writes=world.is_main_process)
    shards = open_shards(Path(order["shards"]))
    if world.gather(newest_whole_checkpoint(run.checkpoints), "the test")[0] is None:
        stage_a.train(config, run, shards, console=False)
    if not spans(config):
        return 0
    if "at" in order and world.is_main_process:
        act_before(order["at"])
    passes = {"all": 0, "one token": 0}
    forward = LanguageModel.forward

    def counted(self: LanguageModel, ids_BT: Any, **options: Any) -> Any:
        passes["all"] += 1
        passes["one token"] += ids_BT.numel() == 1
        return forward(self, ids_BT, **options)

    LanguageModel.forward = counted  # type: ignore[method-assign]
    result = train_stage_b(config, run, shards, console=False)
    every = world.gather(passes, "the test")
    if world.is_main_process:
        print(json.dumps({"step": result.step, "passes": every}))
    return 0


if __name__ == "__main__":
    exit_worker(main(json.loads(sys.argv[1])))
