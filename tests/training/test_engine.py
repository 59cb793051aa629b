"""The engine's gradients are those of the global batch's loss, at every ZeRO stage and number of processes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import forked
import pytest
import torch

from cdrmix.training.deepspeed_config import deepspeed_config
from cdrmix.training.distributed import DistributedContext

# Both sides add the same fp32 terms in another order. A gradient element is a sum over 8 * 24 positions, of products
# that went through sums of up to 64 terms forward and backward in each of 2 blocks: rounding errors of 2**-24 each
# that add up like sqrt(8 * 24 * 4 * 64) of them, 222. An average left undone would be an error of 0.5 or more.
TOLERANCE = 222 * 2**-24


STAGES = (0, 1, 2, 3)
# ZeRO stage, micro-batches, activation checkpointing.
EVERY = list(itertools.product(STAGES, (1, 2), (False, True)))
MOST = [(stage, 2, True) for stage in STAGES]


@pytest.mark.parametrize(
    ("processes", "stack", "combinations", "scaled"),
    [
        pytest.param(1, "tiny", MOST, STAGES, id="1-tiny"),
        pytest.param(2, "tiny", MOST, (), id="2-tiny"),
        pytest.param(2, "hybrid", EVERY, STAGES, id="2-hybrid", marks=pytest.mark.slow),
    ],
)
def test_gradients_norm_and_update_equal_plain_pytorch(
    work,
    tmp_path: Path,
    hybrid: tuple[str, ...],
    processes: int,
    stack: str,
    combinations: list[tuple[int, int, bool]],
    scaled: tuple[int, ...],
) -> None:
    where = tmp_path / "errors.json"
    chosen = {"combinations": json.dumps(combinations), "scaled": json.dumps(scaled)}
    finished = work("gradients", where, *(hybrid if stack == "hybrid" else ()), processes=processes, **chosen)
    assert [process.returncode for process in finished] == [0] * processes, finished[0].stdout
    results = json.loads(where.read_text())
    # fp16's loss scale: a power of two changes no bit, and an overflow no weight
    for stage in scaled:
        assert results.pop(f"scaled {stage}") == {"norm": 0.0, "left": 0.0, "weights": 0.0}
    assert len(results) == len(combinations)
    for combination, errors in results.items():
        assert errors["gradient"] < TOLERANCE, combination
        assert errors["norm"] < TOLERANCE, combination
        # AdamW's first update is lr * g / (|g| + eps): it magnifies the error of elements near zero, up to lr itself.
        # The embedding's largest weight is below 0.1, so lr is 10% and 1e-3 is a hundredth of what an update does.
        assert errors["weights"] < 1e-3, combination


WAIVED = {
    # Deprecated names of other keys; DeepSpeed warns when it reads them.
    "cpu_offload",
    "cpu_offload_param",
    "cpu_offload_use_pin_memory",
    "stage3_gather_fp16_weights_on_model_save",
    # Its default lists modules of transformers; it warns at every start about another list that matches no module.
    "leaf_module",
}


def test_every_zero_key_of_deepspeed_is_written(make_config) -> None:
    world = DistributedContext(0, 2, 0, torch.device("cpu"))
    program = (
        "from deepspeed.runtime.zero.config import DeepSpeedZeroConfig as Zero\n"
        "print(*(field.alias or name for name, field in Zero.model_fields.items()))\n"
    )
    # In a process of its own: deepspeed must not be imported here before parallel.join has told it the accelerator.
    status, told = forked.run(["-c", program])
    assert status == 0, told
    keys = set(told.splitlines()[-1].split())
    assert "stage3_param_persistence_threshold" in keys
    for stage in (0, 1, 2, 3):
        written = deepspeed_config(make_config("train.micro_batch_rows=2", f"train.zero_stage={stage}"), world)
        assert keys - written["zero_optimization"].keys() == WAIVED
        assert written["zero_optimization"].keys() <= keys


def test_gradients_are_clipped_by_one_owner(make_config) -> None:
    world = DistributedContext(0, 2, 0, torch.device("cpu"))
    written = deepspeed_config(make_config("train.micro_batch_rows=2", "train.zero_stage=2"), world)
    assert written["train_batch_size"] == 8
    assert written["gradient_accumulation_steps"] == 2
    assert written["gradient_clipping"] == 1.0
    assert written["zero_optimization"]["stage"] == 2
    assert deepspeed_config(make_config(), world)["gradient_clipping"] == 0.0, "Engine.clip clips without ZeRO"
