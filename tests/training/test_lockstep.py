"""Rollouts under ZeRO-3 and with expert parallelism: without a copy of the model, as with whole models."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cdrmix.config.schema import Config
from cdrmix.errors import ConfigError
from cdrmix.inference.checkpoints import newest_whole_checkpoint, read_weights
from cdrmix.model.language_model import Output
from cdrmix.reason.lockstep import Lockstep
from cdrmix.reason.stage_b import check_stage_b

PHASE = {"steps": 2, "episodes": 4, "micro_batch": 4, "learning_rate": 1.0e-2, "warmup_steps": 0}
REASONING: dict[str, Any] = {
    "chunk": 16,
    "plastic_lora": {"rank": 4, "key_width": 8, "alpha": 1.0, "decay": 1.0},
    "controller": {"step_budget": 64, "max_branches": 2},
    "memory": {"dim": 8, "top_k": 2, "max_tokens": 4096, "tokens": 6},
    # An untrained model answers nothing: the likelihood of the right answer differs between rollouts all the same.
    "rl": {"horizon": 64, "latency_weight": 0.3, "stability_weight": 0.1, "group_size": 3, "reward": "likelihood"},
    "plasticity": {"task": "recall", "tokens": True, "chunks": 3},
    "acceptance": {"task": "poisoned", "tokens": True, "chunks": 3},
    "agent": {"task": "agent", "tokens": True, "chunks": 3},
    "operations": {"task": "hops", "tokens": True, "chunks": 3},
    "phases": {
        "plasticity": PHASE | {"train": "all"},
        "acceptance": PHASE,
        "imitation": PHASE | {"train": "all"},
        "policy": PHASE | {"train": "all", "replay": ["plasticity"]},
        "operations_imitation": PHASE
        | {"train": "all", "replay": ["text"], "summarised": 0.4, "summarised_batches": 1.0},
        "operations": PHASE | {"train": "all"},
        "joint": PHASE | {"replay": ["operations_imitation"]},
    },
    "evaluation": {"chunks": [2], "episodes": 4},
}


@pytest.fixture
def reasoning(config_file: Path, tmp_path: Path) -> Path:
    """The tiny configuration with every phase of stage B."""
    content = yaml.safe_load(config_file.read_text())
    train = content["train"] | {
        "steps": 2,
        "micro_batch_rows": 1,
        "warmup_steps": 1,
        "evaluate_every": 2,
        "log_every": 1,
    }
    content |= {"train": train, "reasoning": REASONING}
    path = tmp_path / "reasoning.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


class Trained:
    """A run that has ended: its weights, its records, and the passes that each process has made."""

    def __init__(self, folder: Path, output: str) -> None:
        self.folder = folder
        newest = newest_whole_checkpoint(folder / "checkpoints")
        assert newest is not None
        self.weights = read_weights(newest)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        self.records = [json.loads(line) for line in lines]
        told = [line for line in output.splitlines() if line.startswith('{"step"')]
        self.passes = json.loads(told[-1])["passes"] if told else []

    def differing(self, other: Trained) -> list[str]:
        """The names of weights with other bits."""
        assert self.weights.keys() == other.weights.keys()
        return [name for name, tensor in self.weights.items() if not torch.equal(tensor, other.weights[name])]


Train = Callable[..., Trained]


@pytest.fixture
def train(work: Any, reasoning: Path, tmp_path: Path) -> Train:
    """`train(name, override, ..., processes=2)`: both stages; of runs with other names stage A is trained once."""
    first: list[Path] = []

    def run(name: str, *overrides: str, processes: int = 2, expected: int = 0, **options: str) -> Trained:
        if first and not (tmp_path / name).exists():
            options["start"] = str(first[0])
        told = work(
            "train",
            tmp_path / name,
            *overrides,
            processes=processes,
            script="rollout_worker.py",
            config=str(reasoning),
            **options,
        )
        output = "\n".join(each.stdout for each in told)
        if expected:
            assert expected in [each.returncode for each in told], output
        else:
            assert [each.returncode for each in told] == [0] * processes, output
        return Trained(tmp_path / name, told[0].stdout)

    first.append(
        run("stage-a", *(f"reasoning.phases.{name}.steps=0" for name in REASONING["phases"]), processes=1).folder
    )
    return run


ONCE = tuple(f"reasoning.phases.{name}.steps=1" for name in REASONING["phases"])
# What is counted, not summed in floating point: equal rollouts have equal numbers.
COUNTED = ("latency", "stability", "capture", "changes", "noop", "retrieve", "accept_good")
# Both sides add the same float32 terms in another order, of at most 6,000 rows and 300 words: 2e-7 were seen in a loss,
# 3e-7 in the norm. AdamW divides by the size of a gradient, so weights say nothing where it is rounding alone.
TOLERANCE = 1e-5


def check_equal(found: Trained, expected: Trained) -> None:
    """Rollouts are equal, losses and gradients up to rounding."""
    assert len(found.records) == len(expected.records)
    for mine, other in zip(found.records, expected.records, strict=True):
        for key in ("loss", "gradient_norm"):
            assert mine[key] == pytest.approx(other[key], rel=TOLERANCE, abs=1e-7), (other.get("phase"), key)
        measures = other.get("measures", {})
        for key in measures:
            name = key.rpartition("/")[2]
            if name in COUNTED:
                assert mine["measures"][key] == measures[key], (other["phase"], key)
            elif name in ("reward", "task"):  # a likelihood
                assert mine["measures"][key] == pytest.approx(measures[key], rel=TOLERANCE), (other["phase"], key)


@pytest.mark.long
def test_the_sharded_model_rolls_out_as_a_copy_does(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every phase, bit for bit; and processes with fewer passes go along with the others.

    Without compiled kernels: a copy would decode by the compiled step, whose sums have another order.
    """
    monkeypatch.setenv("CDRMIX_BACKEND", "reference")
    twice = ("reasoning.phases.policy.steps=2", "reasoning.phases.operations.steps=2")
    copied = train("copied", "train.zero_stage=3", "reasoning.rollout_weights=copied", *ONCE, *twice)
    sharded = train("sharded", "train.zero_stage=3", *ONCE, *twice)
    assert sharded.differing(copied) == []
    for mine, other in zip(sharded.records, copied.records, strict=True):
        assert mine["loss"] == other["loss"]
        assert mine.get("measures") == other.get("measures")
    assert copied.passes[0]["all"] != copied.passes[1]["all"], "the processes have different numbers of passes"
    assert sharded.passes[0]["all"] == sharded.passes[1]["all"]
    assert sum(each["one token"] for each in sharded.passes) > sum(each["one token"] for each in copied.passes)


@pytest.mark.long
@pytest.mark.parametrize(("phase", "stages"), [("operations_imitation", (0, 1, 2, 3)), ("operations", (2, 3))])
def test_windows_in_separate_passes_are_trained_as_together(train: Train, phase: str, stages: tuple[int, ...]) -> None:
    """Processes have different numbers of passes, and the gradients of several micro-batches and of text are added."""
    keys, separate = separate_keys(phase)
    together = train("together", "train.zero_stage=0", *keys)
    for stage in stages:
        check_equal(train(f"separate {stage}", separate, f"train.zero_stage={stage}", *keys), together)
    check_equal(train("experts", separate, "train.zero_stage=3", "train.expert_parallel=2", *keys), together)


@pytest.mark.slow
@pytest.mark.parametrize("phase", [pytest.param("operations_imitation", marks=pytest.mark.long), "operations"])
def test_gradients_of_earlier_passes_reach_the_offloaded_optimizer(train: Train, phase: str) -> None:
    """The last pass of a step gives the operations' heads no gradient."""
    keys, separate = separate_keys(phase)
    together = train("together", "train.zero_stage=0", *keys, processes=1)
    offload = ("train.zero_stage=3", "train.offload=all")
    check_equal(train("offload", separate, *offload, *keys, processes=1), together)


def separate_keys(phase: str) -> tuple[tuple[str, ...], str]:
    """Settings for a phase with several micro-batches, and the one for separate passes. A step of imitation precedes
    operations: heads of zeros have no gradients for the language model."""
    used = {"operations_imitation", phase}
    none = [f"reasoning.phases.{name}.steps=0" for name in REASONING["phases"] if name not in used]
    section = f"reasoning.phases.{phase}"
    keys = (*none, f"{section}.micro_batch=1", f"{section}.train=all", "train.precision=fp32")
    if phase == "operations":
        keys += tuple(f"reasoning.phases.operations_imitation.{each}" for each in ("steps=1", "learning_rate=0.1"))
    return keys, f"{section}.window_passes=separate"


@pytest.mark.long
def test_passes_of_other_kinds_give_their_gradients_in_the_same_order(train: Train) -> None:
    """In processes of which some have summaries in front of their windows and some not; and in a joint step also where
    some have windows of several chunks of fast weights and some not."""
    used = ("operations_imitation", "joint")
    none = [f"reasoning.phases.{name}.steps=0" for name in REASONING["phases"] if name not in used]
    section = "reasoning.phases.operations_imitation"
    mixed = (
        f"{section}.micro_batch=1",
        f"{section}.summarised_batches=0.5",
        f"{section}.steps=4",
        "reasoning.phases.joint.steps=2",
    )
    keys = (*none, *mixed, "train.precision=fp32")
    whole = train("whole", "train.zero_stage=0", *keys)
    for stage in (2, 3):
        for passes in ("together", "separate"):
            found = train(f"{passes} {stage}", f"train.zero_stage={stage}", f"{section}.window_passes={passes}", *keys)
            check_equal(found, whole)


@pytest.mark.long
def test_divided_experts_roll_out_as_whole_ones(train: Train) -> None:
    whole = train("whole", "train.zero_stage=0", *ONCE)
    check_equal(train("sharded", "train.zero_stage=3", *ONCE), whole)
    check_equal(train("experts", "train.zero_stage=0", "train.expert_parallel=2", *ONCE), whole)
    check_equal(train("both", "train.zero_stage=3", "train.expert_parallel=2", *ONCE), whole)


@pytest.mark.long
def test_four_processes_with_two_copies_of_each_expert(train: Train) -> None:
    whole = train("whole", "train.zero_stage=0", *ONCE, processes=4)
    for stage in (0, 3):
        divided = train(f"divided {stage}", f"train.zero_stage={stage}", "train.expert_parallel=2", *ONCE, processes=4)
        check_equal(divided, whole)


@pytest.mark.long
def test_a_killed_run_resumes_with_the_same_bits(train: Train) -> None:
    none = [f"reasoning.phases.{name}.steps=0" for name in REASONING["phases"] if name not in ("policy", "operations")]
    keys = ("train.zero_stage=3", "train.expert_parallel=2", *none, "reasoning.phases.policy.steps=3")
    straight = train("straight", *keys)
    train("killed", *keys, expected=-9, at="2:SIGKILL")  # after a checkpoint, in the rollouts of the third step
    assert train("killed", *keys).differing(straight) == []


class TwoProcesses:
    """What a Lockstep needs of a DistributedContext, for two threads. A thread that waits alone fails."""

    def __init__(self) -> None:
        self._flags: list[bool] = []
        self._found = False
        self._barrier = threading.Barrier(2, action=self._agree, timeout=5)

    def _agree(self) -> None:
        self._found = any(self._flags)
        self._flags.clear()

    def any(self, flag: bool) -> bool:
        """Whether a thread has set the flag."""
        self._flags.append(flag)
        self._barrier.wait()
        return self._found


class Counting(nn.Module):
    """A model that counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []
        self.weight = nn.Parameter(torch.zeros(1))  # whose device is that of the passes

    def forward(self, ids_BT: torch.Tensor) -> Output:
        self.read.append(ids_BT.numel())
        return Output(torch.zeros(*ids_BT.shape, 1), None, None, None)


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 2))
@settings(max_examples=examples(10))
def test_whoever_has_fewer_passes_makes_passes_of_one_token(first: int, second: int, least: int) -> None:
    world, models = TwoProcesses(), [Counting(), Counting()]

    def work(model: Counting, passes: int) -> int:
        with Lockstep(world)(model, least) as further:  # type: ignore[arg-type]
            for _ in range(passes):
                model(torch.zeros(2, 3, dtype=torch.int64))
        return len(further)

    with ThreadPoolExecutor(2) as threads:
        further = list(threads.map(work, models, (first, second)))
    most = max(first, second, least)
    assert further == [most - first, most - second]
    assert [model.read for model in models] == [[6] * count + [1] * (most - count) for count in (first, second)]


@pytest.mark.parametrize("made", [0, 1, 2])
def test_alone_a_process_makes_no_more_than_the_fewest_passes(made: int) -> None:
    model = Counting()
    with Lockstep()(model, least=1) as further:  # type: ignore[arg-type]
        for _ in range(made):
            model(torch.zeros(2, 3, dtype=torch.int64))
    assert len(further) == max(1 - made, 0)
    assert len(model.read) == max(made, 1)


def test_every_process_needs_episodes_before_anything_is_trained(reasoning: Path) -> None:
    config = Config.from_yaml(reasoning)
    check_stage_b(config, 4)
    with pytest.raises(ConfigError, match=r"acceptance\.episodes is 4; it must be a multiple of the 3 processes"):
        check_stage_b(config, 3)
    own = ["reasoning.phases.operations_imitation.train=own", "train.zero_stage=3"]
    with pytest.raises(ConfigError, match=r"train is own and summarised is above 0, which .* set train to all, or"):
        check_stage_b(Config.from_yaml(reasoning, own), 2)
    with pytest.raises(ConfigError, match=r"plasticity\.episodes is 4; each of the 8 processes \(--nproc\) needs one"):
        check_stage_b(config, 8)
    with pytest.raises(ConfigError, match=r"acceptance trains no expert, which .* set train\.zero_stage to 0 or 3"):
        check_stage_b(Config.from_yaml(reasoning, ["train.expert_parallel=2", "train.zero_stage=1"]), 2)


def test_a_divergence_needs_a_copy_of_the_model(reasoning: Path) -> None:
    keys = ["train.zero_stage=3", "reasoning.rl.kl_weight=0.1"]
    with pytest.raises(ConfigError, match=r"kl_weight(.|\n)*0 under ZeRO-3 with reasoning\.rollout_weights=sharded"):
        Config.from_yaml(reasoning, keys)
    assert Config.from_yaml(reasoning, [*keys, "reasoning.rollout_weights=copied"])
    with pytest.raises(ConfigError, match=r"kl_weight(.|\n)*0 with train\.expert_parallel=2"):
        Config.from_yaml(reasoning, ["reasoning.rl.objective=grpo", "train.expert_parallel=2"])
