"""`cdrmix reason demo --memory FOLDER`: a durable index: commits, rollbacks, kills, other models, the step budget."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
import torch
from in_process import main

from cdrmix.hf.export import export_model
from cdrmix.inference.load import load_model
from cdrmix.reason import session as sessions
from cdrmix.reason.build import load_stage_b
from cdrmix.reason.controller.controller import decision_of
from cdrmix.reason.heads import NOOP, RETRIEVE, SPLICE
from cdrmix.reason.memory.episodic_index import EpisodicIndex

Arguments = Callable[..., list[str]]
DIM, CHUNK = 16, 32
REASON = (
    *("train.steps=2", "train.checkpoint_every=2", "model.vocab_size=600"),
    f"reasoning={{chunk: {CHUNK}, carry: fast, plastic_lora: {{rank: 4, alpha: 0.5, decay: 1.0}}, "
    "controller: {step_budget: 64, max_branches: 1}, "
    f"memory: {{dim: {DIM}, top_k: 2, max_tokens: 4000, tokens: 4}}, "
    "rl: {horizon: 64, group_size: 4, latency_weight: 0.01, stability_weight: 0.1}, "
    "plasticity: {task: recall, tokens: true, chunks: 2}, "
    "operations: {task: chunk_hops, chunks: 2, difficulty: {hops: 1, chains: 1}}, "
    "evaluation: {chunks: [2], episodes: 2}}",
    "reasoning.phases.plasticity={steps: 1, episodes: 2, micro_batch: 8}",
    "reasoning.phases.operations_imitation={steps: 1, episodes: 2, micro_batch: 8}",
    "reasoning.agent={task: chunk_recall, chunks: 2, difficulty: {pairs: 1}}",
)
BOOK = " ".join(str(number) for number in random.Random(1).sample(range(10**8, 10**9), 45))  # no chunk comes twice


@pytest.fixture(scope="module")
def model(training_alone: None, workspace: Path, arguments: Arguments) -> Path:
    """An export whose operations search, splice the found chunks as often as allowed, and answer."""
    root = workspace / "memory"
    assert main(["train", *arguments(*REASON, f"run.root={root}")]) == 0
    (run,) = root.iterdir()
    loaded = load_model(run)
    bias = torch.zeros(5)
    bias[RETRIEVE], bias[SPLICE], bias[NOOP] = 3.0, 2.0, 1.0
    heads = {**loaded.heads, "operations.policy.bias": bias}
    heads["operations.policy.weight"] = torch.zeros_like(heads["operations.policy.weight"])
    return export_model(loaded._replace(heads=heads), workspace / "searching")


@pytest.fixture
def book(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_text(BOOK)
    return tmp_path / "book.txt"


def demo(model: Path, memory: Path, *options: object) -> list[str]:
    arguments = ["reason", "demo", "--model", model, "--device", "cpu", "--memory", memory, *options]
    return [str(argument) for argument in arguments]


def kept(memory: Path) -> list[tuple[int, list[int]]]:
    """The episodes of the index by id; it is closed again, so that other processes can write."""
    index = EpisodicIndex(memory, DIM, 4000)
    found = [(id, episode.tokens.tolist()) for id, episode in sorted(index._kept.episodes.items())]
    index.close()
    return found


@pytest.mark.slow
def test_a_second_process_answers_from_what_the_first_has_read(
    model: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory, about = tmp_path / "memory", "thing number 3"
    status, said = forked.run(["-m", "cdrmix.cli", *demo(model, memory, "--document", book, "--question", about)])
    assert status == 0, said
    assert "chunk  text" in said
    assert "No phase of this run has trained the token memory" in said
    assert "Answer from the index: " in said
    episodes = kept(memory)
    chunks = [line for line in said.splitlines() if "written x1" in line or "rolled back" in line]
    assert len(episodes) == sum("written x1" in line for line in chunks) > 10
    assert main(demo(model, memory, "--question", about)) == 0
    told = capsys.readouterr().out
    assert f"The index has {len(episodes)} episodes of {CHUNK * len(episodes)} tokens" in told
    found = [line for line in told.splitlines() if line.startswith("Found in the index:")]
    assert found
    for line in found:  # what was found is what the first process has read
        assert line.removeprefix("Found in the index:").strip() in BOOK
    assert "chunk  text" not in told
    # Read again, nothing is kept twice.
    assert main(demo(model, memory, "--document", book, "--question", about)) == 0
    assert kept(memory) == episodes


def test_what_the_controller_rolls_back_leaves_nothing(
    model: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def every_second(end_BD: torch.Tensor) -> object:
        calls.append(end_BD)
        return decision_of(torch.tensor([len(calls) % 2]))

    monkeypatch.setattr(sessions, "configured", lambda reasoning, heads: every_second)
    assert main(demo(model, tmp_path / "memory", "--document", book, "--question", "thing number 3")) == 0
    told = capsys.readouterr().out
    assert told.count("rolled back") == len(calls) // 2
    assert len(kept(tmp_path / "memory")) == told.count("written x1") == -(-len(calls) // 2)


@pytest.mark.parametrize("attempt", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_moment_no_commit_is_lost(model: Path, book: Path, tmp_path: Path, attempt: int) -> None:
    """Two kills at random moments, then a read to the end: the index equals that of an uninterrupted run."""
    options = ("--document", book, "--question", "thing number 3")
    assert main(demo(model, tmp_path / "whole", *options)) == 0
    whole, draw = kept(tmp_path / "whole"), random.Random(attempt)
    memory = tmp_path / "memory"
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    for _ in range(2):
        victim = forked.start(["-m", "cdrmix.cli", *demo(model, memory, *options)], environment)
        wanted = draw.randrange(1, len(whole) - 2)
        while victim.output.count("written x1") < wanted:
            assert victim.poll() is None, "the command ended before it could be killed"
            time.sleep(0.002)
        time.sleep(draw.random() * 0.05)
        victim.kill()
        assert victim.wait() == -signal.SIGKILL
        acknowledged = victim.output.count("written x1")
        found = kept(memory)
        assert found == whole[: len(found)]
        assert len(found) >= acknowledged
    assert main(demo(model, memory, *options)) == 0
    assert kept(memory) == whole


BUDGET = 3


@pytest.fixture(scope="module")
def small_budget(model: Path, workspace: Path) -> Path:
    """The same model with a step budget of BUDGET and a memory agent, whose memory changes at many chunks."""
    loaded = load_model(model)
    reasoning = loaded.config.reasoning
    assert reasoning is not None
    imitation = reasoning.phases.imitation.model_copy(update={"steps": 1})
    changes = {
        "phases": reasoning.phases.model_copy(update={"imitation": imitation}),
        "controller": reasoning.controller.model_copy(update={"step_budget": BUDGET}),
    }
    config = loaded.config.model_copy(update={"reasoning": reasoning.model_copy(update=changes)})
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(12.0)  # else the model writes the same memory at every chunk
    return export_model(loaded._replace(config=config), workspace / "small-budget")


def test_the_step_budget_limits_a_session(
    small_budget: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the budget neither the fast weights nor the token memory change, also in a session that was saved."""
    command = ["reason", "demo", "--model", small_budget, "--device", "cpu", "--question", "thing number 3"]
    command += ["--document", book, "--session", tmp_path / "session.safetensors"]
    message = f"The step budget of {BUDGET} is spent: the fast weights and the memory no longer change."
    for updates in (BUDGET, 0):
        assert main([str(argument) for argument in command]) == 0
        output = capsys.readouterr().out
        assert output.count("written x1") + output.count("rolled back") == updates
        assert output.count('  * "') == updates
        assert message in output.splitlines()


def test_a_question_that_the_operations_cannot_read_is_refused_first(
    model: Path, book: Path, tmp_path: Path, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_model(model)
    reasoning = loaded.config.reasoning
    assert reasoning is not None
    wide = reasoning.model_copy(update={"agent": reasoning.agent.model_copy(update={"question_tokens": 200})})
    folder = export_model(
        loaded._replace(config=loaded.config.model_copy(update={"reasoning": wide})), workspace / "wide"
    )
    for question, code in (("thing " * 30, 2), ("thing", 0)):
        assert main(demo(folder, tmp_path / "memory", "--document", book, "--question", question)) == code
        captured = capsys.readouterr()
        refused = "--memory: the question has 151 tokens; the window in which this model's operations read it has space"
        assert (refused in captured.err) == (code == 2)
        assert ("written x1" in captured.out) == (code == 0), "the question is checked before the document is read"


@pytest.mark.slow
def test_a_session_belongs_to_one_model(
    model: Path, book: Path, tmp_path: Path, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where another model has the same sizes."""
    loaded = load_model(model)
    with torch.no_grad():
        next(iter(loaded.model.parameters())).add_(1e-3)
    other = export_model(loaded, workspace / "other-weights")
    options = [
        "--device",
        "cpu",
        "--question",
        "thing number 3",
        "--document",
        book,
        "--session",
        tmp_path / "a.session",
    ]

    def read_with(folder: Path) -> int:
        return main([str(argument) for argument in ("reason", "demo", "--model", folder, *options)])

    assert read_with(model) == 0
    written = (tmp_path / "a.session").read_bytes()
    assert read_with(other) == 5
    assert "a.session is the session of another model, or of other weights of it" in capsys.readouterr().err
    assert (tmp_path / "a.session").read_bytes() == written
    assert read_with(model) == 0


def test_memories_that_are_refused(
    model: Path, finished_without: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = tmp_path / "memory"
    assert main(demo(model, memory, "--question", "thing")) == 0
    note = (memory / "model.json").read_text()
    (memory / "model.json").write_text(note.replace('"keys": "', '"keys": "0'))
    capsys.readouterr()
    assert main(demo(model, memory, "--question", "thing")) == 11
    assert "is the memory of another model, or of other weights of it" in capsys.readouterr().err
    (memory / "model.json").write_text("{")
    assert main(demo(model, memory, "--question", "thing")) == 11
    (memory / "model.json").unlink()
    assert main(demo(model, memory, "--question", "thing")) == 11
    assert "has an episode log but no model.json" in capsys.readouterr().err
    (memory / "model.json").write_text(note)
    assert main(demo(model, book, "--question", "thing")) == 2
    assert "name a new folder or the folder of a memory" in capsys.readouterr().err
    assert main(demo(finished_without, tmp_path / "other", "--question", "thing")) == 2
    assert "was not trained to use an index" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert main(demo(model, memory, "--document", book)) == 2
    assert "with --memory you can give --question without --document" in capsys.readouterr().err
    with (memory / "episodes.log").open("ab") as file:
        file.write(b"torn")
    assert main(demo(model, memory, "--question", "thing")) == 0
    assert "moved 4 bytes of an incomplete commit to a separate file" in capsys.readouterr().out


@pytest.fixture(scope="module")
def finished_without(model: Path, workspace: Path) -> Path:
    """The same model, whose configuration trains no operations."""
    folder = workspace / "without"
    loaded = load_model(model)
    assert loaded.config.reasoning is not None
    phases = loaded.config.reasoning.phases
    less = phases.model_copy(
        update={"operations_imitation": phases.operations_imitation.model_copy(update={"steps": 0})}
    )
    reasoning = loaded.config.reasoning.model_copy(update={"phases": less})
    config = loaded.config.model_copy(update={"reasoning": reasoning})
    heads = {name: tensor for name, tensor in loaded.heads.items() if not name.startswith("operations.")}
    found = export_model(loaded._replace(config=config, heads=heads), folder)
    assert load_stage_b(load_model(found)).operations is None
    return found
