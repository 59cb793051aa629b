"""A process keeps its share of each parameter as it is made, with the bits of a whole one, and holds no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cdrmix.config.schema import Config
from cdrmix.plan.parameters import count_parameters


@pytest.mark.slow
@pytest.mark.parametrize("experts", [1, 2])
def test_no_process_holds_a_whole_parameter_or_casts_of_it(
    work, tmp_path: Path, hybrid: tuple[str, ...], experts: int
) -> None:
    where = tmp_path / "told.json"
    more = (*hybrid, f"train.expert_parallel={experts}", "train.micro_batch_rows=4", "model.bigrams={rows: 50}")
    more += ("train.precision=bf16", "train.activation_checkpointing=true")
    told = work("make", where, *more, "model.tie_embeddings=false", processes=2, script="sharded_worker.py")
    assert [each.returncode for each in told] == [0, 0], "\n".join(each.stdout for each in told)
    facts = json.loads(where.read_text())
    assert facts["wrong"] == []
    assert facts["whole"] == 0, "between the construction and the engine"
    assert 0.49 < facts["share"] < 0.55, "padding adds some elements to small parameters"
    assert facts["casts"] == facts["activation"], "autocast keeps no weights in 16 bits"
    first, second = facts["written"]
    assert abs(first - second) < 0.1 * (first + second), "each process writes its part of a checkpoint"


@pytest.mark.long
@pytest.mark.timeout(1300)  # the processes construct one after another
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the peak of a process's memory, of Linux")
def test_eight_processes_make_two_blocks_of_the_largest_model(work, tmp_path: Path) -> None:
    """core-200b at full width, 14.8e9 parameters, divided as its configuration says: 8 processes compute each layer."""
    where = tmp_path / "told.json"
    config = Path(__file__).parents[2] / "configs" / "cdrmix-core-200b.yaml"
    keys = ("model.layers=2", "train.pipeline_parallel=1", "run.device=cpu")
    told = work("make", where, *keys, processes=8, script="full_width_worker.py", config=str(config), patience="1200")
    assert [each.returncode for each in told] == [0] * 8, "\n".join(each.stdout for each in told)
    facts = json.loads(where.read_text())
    whole = count_parameters(Config.from_yaml(config, [*keys]).cdrmix_model).total_stored
    assert len({each["router"] for each in facts}) == 1, "every process has the whole router"
    assert len({each["experts"] for each in facts}) == 8
    for each in facts:
        assert each["elements"] < 1.03 * whole / 8, "every process has the first low-rank maps of RWKV-7 whole"
        # Beside the share, 7.6 GB: a tile of 16 MiB and its copy for each thread, and one whole low-rank map.
        assert each["most"] < 1.1 * each["held"]
