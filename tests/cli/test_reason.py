"""Stage B from the command line: every phase, kill and resume bit for bit, several processes, and errors."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import forked
import pytest
import torch
from in_process import main
from json_rows import read_metrics

from cdrmix.errors import ConfigError
from cdrmix.inference.checkpoints import read_weights
from cdrmix.inference.load import Loaded, load_model
from cdrmix.model.language_model import LanguageModel
from cdrmix.reason import stage_b
from cdrmix.reason.build import load_stage_b
from cdrmix.reason.demo import demonstrate
from cdrmix.reason.model import StageBModel

Arguments = Callable[..., list[str]]
PHASES = ("plasticity", "acceptance", "imitation", "policy", "operations_imitation", "operations", "joint")
STEPS_A, STEPS = 2, 3  # of stage A, of every phase
REASON = (
    f"train.steps={STEPS_A}",
    "train.checkpoint_every=2",
    "train.ema_decay=0.9",
    "reasoning={chunk: 16, carry: fast, plastic_lora: {rank: 4, alpha: 0.5, decay: 1.0}, "
    "controller: {step_budget: 64, max_branches: 2}, "
    "memory: {dim: 16, top_k: 2, max_tokens: 1000, tokens: 4}, "
    "rl: {horizon: 64, group_size: 4, latency_weight: 0.01, stability_weight: 0.1}, "
    "plasticity: {task: recall, tokens: true, chunks: 2}, acceptance: {task: poisoned, tokens: true, chunks: 3}, "
    "agent: {task: agent, tokens: true, chunks: 2}, operations: {task: hops, tokens: true, chunks: 3}, "
    "evaluation: {chunks: [4], episodes: 2}}",
    *(f"reasoning.phases.{name}={{steps: {STEPS}, episodes: 2, micro_batch: 8}}" for name in PHASES),
    "reasoning.phases.operations_imitation.train=all",
    "reasoning.phases.operations_imitation.replay=[text, plasticity, imitation]",
)


@pytest.fixture(scope="module")
def alive() -> list[int]:
    """How many language models there were when a phase of `finished` built its own."""
    return []


@pytest.fixture(scope="module")
def finished(workspace: Path, arguments: Arguments, alive: list[int]) -> Path:
    """An uninterrupted run of both stages."""
    root = workspace / "reason"
    made: WeakSet[LanguageModel] = WeakSet()
    initialise, build = LanguageModel.__init__, stage_b.build_model

    def noted(self: LanguageModel, *arguments: Any, **named: Any) -> None:
        initialise(self, *arguments, **named)
        made.add(self)

    def counted(*arguments: Any, **named: Any) -> StageBModel:
        alive.append(len(made))
        return build(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageModel, "__init__", noted)
        patch.setattr(stage_b, "build_model", counted)
        assert main(["train", *arguments(*REASON, f"run.root={root}")]) == 0
    (run,) = root.iterdir()
    return run


@pytest.mark.usefixtures("finished")
def test_the_model_of_a_phase_is_gone_before_the_next_is_built(alive: list[int]) -> None:
    """Also of stage A and of the evaluation after it: a device holds one model, with its moments and gradients."""
    assert alive == [0] * len(PHASES)


def test_every_phase_is_done_measured_and_shown(finished: Path) -> None:
    rows = read_metrics(finished / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS_A + STEPS * len(PHASES) + 1))
    assert [row["phase"] for row in rows if "phase" in row] == [name for name in PHASES for _ in range(STEPS)]
    (replaying,) = (row for row in rows if row.get("phase") == "operations_imitation" and row["phase_step"] == STEPS)
    (joint,) = (row for row in rows if row.get("phase") == "joint" and row["phase_step"] == STEPS)
    assert {"agreed", "text_loss", "plasticity/accuracy", "imitation/accuracy"} <= replaying["measures"].keys()
    assert {"text_loss", "plasticity/accuracy", "policy/reward"} <= joint["measures"].keys()
    summary = json.loads((finished / "metrics.json").read_text())
    assert summary["finished"]
    assert set(summary["mechanisms"]) == {"plasticity", "acceptance", "agent", "operations"}
    page = (finished / "report.html").read_text()
    assert "each mechanism on and off" in page
    assert "Stage B: phases" in page
    assert page.count("<picture>") >= 3


def test_an_exported_model_has_adapters_and_heads(finished: Path) -> None:
    of_run, exported = load_model(finished), load_model(finished / "export")
    assert of_run.model.adapters > 0
    for one, two in zip(*(load_stage_b(loaded).state_dict().items() for loaded in (of_run, exported)), strict=True):
        assert one[0] == two[0]
        assert torch.equal(one[1], two[1])
    assert main(["compare", str(finished), str(finished / "export")]) == 0


# In each phase that draws; step 3 of the phase, so that a checkpoint of the same phase may be there or not.
@pytest.mark.slow
@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("acceptance", marks=pytest.mark.long),
        pytest.param("policy", marks=pytest.mark.long),
        "operations",
        pytest.param("joint", marks=pytest.mark.long),
    ],
)
def test_killed_in_a_phase_and_resumed(finished: Path, arguments: Arguments, phase: str, tmp_path: Path) -> None:
    victim = forked.start(["-m", "cdrmix.cli", "train", *arguments(*REASON, f"run.root={tmp_path}")])
    deadline = time.monotonic() + 200

    def reached() -> bool:
        rows = [row for run in tmp_path.glob("*") for row in read_metrics(run / "metrics.jsonl")]
        return any(row.get("phase") == phase for row in rows)

    while not reached():
        assert victim.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    assert main(["train", *arguments(*REASON, f"run.root={tmp_path}"), "--resume", "auto"]) == 0
    (killed,) = tmp_path.iterdir()
    steps = [row["step"] for row in read_metrics(killed / "metrics.jsonl")]
    assert steps == list(range(1, STEPS_A + STEPS * len(PHASES) + 1))
    assert main(["compare", str(finished), str(killed)]) == 0


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])  # 1 is that of auto; at 3 rollouts need a copy of the model
def test_two_processes_divide_a_phase(arguments: Arguments, stage: int, tmp_path: Path) -> None:
    steps = [f"reasoning.phases.{name}.steps=2" for name in PHASES]
    overrides = arguments(*REASON, *steps, f"run.root={tmp_path}", f"train.zero_stage={stage}")
    assert main(["train", "--nproc", "2", *overrides]) == 0
    (run,) = tmp_path.iterdir()
    assert json.loads((run / "metrics.json").read_text())["finished"]


def test_a_backbone_of_other_sizes_is_refused(
    finished: Path, arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = arguments(
        *REASON, f"run.root={tmp_path}", f"reasoning.backbone={finished}", "model.feed_forward.hidden=32"
    )
    assert main(["train", *overrides, f"data.tokenizer.path={finished / 'tokenizer.json'}"]) == 5
    assert "feed_forward.w_up with shape [4, 32, 16]; the configuration needs [4, 32, 32]" in capsys.readouterr().err


@pytest.mark.slow
def test_stage_b_begins_with_a_trained_backbone(
    finished: Path, arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(finished.parent))
    overrides = arguments(*REASON, f"run.root={tmp_path}", f"reasoning.backbone=~/{finished.name}")
    overrides += [f"reasoning.phases.{name}.steps=0" for name in PHASES if name != "acceptance"]
    assert main(["train", *overrides, f"data.tokenizer.path={finished / 'tokenizer.json'}"]) == 0
    (run,) = tmp_path.iterdir()
    assert {row["phase"] for row in read_metrics(run / "metrics.jsonl")} == {"acceptance"}


@pytest.mark.usefixtures("training_alone")
def test_stage_b_begins_with_the_running_average_of_stage_a(arguments: Arguments, tmp_path: Path) -> None:
    """The acceptance phase trains only heads, so the language model after it is the one that it started with."""
    overrides = arguments(*REASON, f"run.root={tmp_path}")
    overrides += [f"reasoning.phases.{name}.steps=0" for name in PHASES if name != "acceptance"]
    assert main(["train", *overrides]) == 0
    (run,) = tmp_path.iterdir()
    stage_a = run / "checkpoints" / f"step-{STEPS_A:08d}"
    average, last = (read_weights(stage_a, average=average) for average in (True, False))
    begun = load_model(run).model.state_dict()
    changed = {name for name in average if not torch.equal(average[name], last[name])}
    assert changed
    assert all(torch.equal(begun[name], average[name]) for name in average)


def test_a_model_without_stage_b_cannot_show_it(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = finished / "checkpoints"
    assert main(["reason", "demo", "--model", str(finished)]) == 2
    assert "ids of a vocabulary of its own" in capsys.readouterr().err
    assert first.is_dir()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reasoning.backbone=/no/where", "reasoning.backbone=/no/where does not exist"),
        ("reasoning.plasticity.task=foo", "reasoning.plasticity, an episode of 2 chunks: "),
    ],
)
@pytest.mark.parametrize("command", ["validate", "train"])
def test_what_stage_b_could_not_have_is_said_at_once(
    command: str, override: str, message: str, arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *arguments(*REASON, f"run.root={tmp_path / 'runs'}", override)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--document", "{}/absent.txt", "--question", "what?"], "absent.txt cannot be read: No such file"),
        (["--document", "{}", "--question", "what?"], "cannot be read: Is a directory"),
        (["--document", "{}/some.txt", "--question", " "], "--question is empty"),
        (["--session", "{}"], "name a file in a folder that exists"),
        (["--session", "{}/absent/one.safetensors"], "name a file in a folder that exists"),
    ],
)
def test_what_a_demonstration_cannot_read_or_write(options: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("The code of Bukeba is 1705.")
    document, question, session = (
        options[options.index(name) + 1].format(tmp_path) if name in options else None
        for name in ("--document", "--question", "--session")
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        demonstrate(
            cast(Loaded, None),  # refused before the model is looked at
            document=Path(document) if document else None,
            question=question,
            session=Path(session) if session else None,
        )
