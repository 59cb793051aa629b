"""Stage B on documents of the user, from the command line: training, rewards, resuming, and answers."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from in_process import main
from json_rows import read_metrics

from cdrmix.data.tasks import make_example

Arguments = Callable[..., list[str]]
ROWS = 200
REWARD = '''"""Part of the reward for any number, all of it for the right one; it fails for some answers."""


def score(question, answer, row):
    assert row["answers"] and question.startswith("What is the code of")
    if sum(map(ord, answer)) % 16 == 0:
        raise OverflowError(answer)
    if answer in row["answers"]:
        return 1.0
    return 0.5 if answer.isdigit() else 0.001 * (len(answer) % 100)
'''


def settings(folder: Path) -> tuple[str, ...]:
    return (
        "train.steps=2",
        "train.checkpoint_every=2",
        "reasoning={chunk: 32, carry: fast, plastic_lora: {rank: 4, alpha: 0.5, decay: 1.0, rwkv7: [output]}, "
        "controller: {step_budget: 64, max_branches: 1}, "
        "memory: {dim: 16, top_k: 2, max_tokens: 1000, tokens: 32}, "
        "rl: {horizon: 64, group_size: 4, latency_weight: 0.01, stability_weight: 0.1, "
        "reward: 'rewards_of_a_user:score', rollouts_every: 2}, "
        f"plasticity: {{data: {{kind: jsonl, paths: [{folder}/questions.jsonl]}}, chunks: 9, question_tokens: 96}}, "
        f"agent: {{data: {{kind: jsonl, paths: [{folder}/questions.jsonl]}}, chunks: 9, question_tokens: 96, "
        "answer_tokens: 128}, evaluation: {episodes: 2}}",
        "reasoning.phases.plasticity={steps: 2, episodes: 4, micro_batch: 4}",
        "reasoning.phases.imitation={steps: 2, episodes: 2, micro_batch: 32}",
        "reasoning.phases.policy={steps: 3, episodes: 2, micro_batch: 32, rollout_rows: 4}",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 documents, each with a question of some 60 tokens, and a file with a reward."""
    path = tmp_path_factory.mktemp("user")
    (path / "rewards_of_a_user.py").write_text(REWARD)
    lines = []
    for number in range(ROWS):
        made = make_example("recall", 5, number, 150)
        context, _, rest = made.prompt.rpartition("\nQuestion: ")
        question, answer = rest.removesuffix("\nAnswer:"), made.answer.strip()
        fact = next(f"{each}." for each in context.split(". ") if each.rstrip(".").endswith(answer)).replace("..", ".")
        lines.append({"context": context, "question": question, "answers": [answer, "no"], "facts": [fact]})
    (path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command runs in the folder with the reward."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture(scope="module")
def finished(folder: Path, arguments: Arguments) -> Path:
    """An uninterrupted run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        assert main(["train", *arguments(*settings(folder), f"run.root={folder}/runs")]) == 0
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.mark.slow
def test_documents_are_trained_on_measured_and_shown(finished: Path) -> None:
    summary = json.loads((finished / "metrics.json").read_text())
    assert summary["finished"]
    assert summary["mechanisms"].keys() == {"plasticity", "agent"}
    assert summary["mechanisms"]["agent"].keys() == {"9"}
    assert summary["demonstration"]["lines"][0].startswith("Question: What is the code of")
    rows = [row for row in read_metrics(finished / "metrics.jsonl") if row.get("phase") == "policy"]
    assert all(0 <= row["measures"]["reward_errors"] <= 1 for row in rows)
    shown = read_metrics(finished / "rollouts.jsonl")
    assert sorted({row["step"] for row in shown}) == [7, 9], "the first and the third step of the phase"
    assert len(shown) == 2 * 4
    assert all(row["right"][1] == "no" and 0 < len(row["memories"]) <= 9 for row in shown)
    page = (finished / "report.html").read_text()
    assert "Rollouts of the policy phase" in page
    assert "written after each chunk" in page


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_run_goes_on_with_the_same_rollouts(finished: Path, inside: Path, arguments: Arguments) -> None:
    root = inside / "killed"
    command = ["train", *arguments(*settings(inside), f"run.root={root}")]
    victim = forked.start(["-m", "cdrmix.cli", *command])  # in the folder of this process, with the reward

    def in_policy() -> bool:
        rows = [row for run in root.glob("*") for row in read_metrics(run / "metrics.jsonl")]
        return any(row.get("phase") == "policy" for row in rows)

    deadline = time.monotonic() + 200
    while not in_policy():
        assert victim.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    assert main([*command, "--resume", "auto"]) == 0
    (run,) = root.iterdir()
    assert (run / "rollouts.jsonl").read_text() == (finished / "rollouts.jsonl").read_text()
    assert main(["compare", str(run), str(finished)]) == 0


@pytest.mark.slow
@pytest.mark.long
def test_a_changed_file_does_not_go_on_with_an_old_run(
    inside: Path, arguments: Arguments, capfd: pytest.CaptureFixture[str]
) -> None:
    changed = inside / "changed"
    changed.mkdir()
    lines = (inside / "questions.jsonl").read_text().splitlines(keepends=True)
    (changed / "questions.jsonl").write_text("".join(lines))
    command = ["train", *arguments(*settings(changed), f"run.root={changed}/runs", "reasoning.phases.policy.steps=1")]
    assert main(command) == 0
    (run,) = (changed / "runs").iterdir()
    (changed / "questions.jsonl").write_text("".join(lines[1:]))
    capfd.readouterr()
    summary = json.loads((run / "metrics.json").read_text())
    (run / "metrics.json").write_text(json.dumps(summary | {"finished": False}))
    assert main([*command, "--resume", "auto"]) == 3
    assert "the questions have changed since this run began" in capfd.readouterr().err


def test_a_reward_is_checked_before_training(
    inside: Path, arguments: Arguments, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["validate", *arguments(*settings(inside))]
    assert main(command) == 0
    for reward, code, said in (
        ("exakt", 2, "did you mean 'exact'?"),
        ("rewards_of_nobody:score", 12, "there is no module 'rewards_of_nobody' in this folder"),
    ):
        assert main([*command, f"reasoning.rl.reward={reward}"]) == code
        assert said in capfd.readouterr().err
    missing = "reasoning.agent.data.paths=[nowhere.jsonl]"
    few = [f"reasoning.phases.{name}.steps=0" for name in ("plasticity", "policy")]  # planning a phase takes seconds
    assert main(["train", "--dry-run", *arguments(*settings(inside)), *few, missing]) == 3
    assert "nothing is at 'nowhere.jsonl'" in capfd.readouterr().err


@pytest.mark.long
def test_eval_asks_by_every_mechanism(finished: Path, inside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tasks = f"qa1,jsonl:{inside}/questions.jsonl"
    command = ["reason", "eval", "--model", str(finished), "--tasks", tasks, "--lengths", "256", "--count", "2"]
    assert main([*command, "--json"]) == 0
    captured = capfd.readouterr()
    assert "of 200 questions were trained on, and are left out" in captured.err
    rows = json.loads(captured.out)
    mechanisms = ["memory", "last chunk", "fast weights", "no writes", "whole text"]
    assert [row["mechanism"] for row in rows] == 2 * mechanisms
    assert [row["task"] for row in rows] == 5 * ["babilong_qa1"] + 5 * [f"jsonl:{inside}/questions.jsonl"]
    for row in rows:
        assert row["questions"] == 2
        assert row["low"] <= row["score"] <= row["high"]
        assert row["tokens_per_second"] > 0
        assert (row["capture"] is not None) == (row["task"].startswith("jsonl") and row["mechanism"] in mechanisms[:2])
    assert main([*command, "--mechanisms", "memory,fast weights"]) == 0
    out = capfd.readouterr().out
    assert "fast weights" in out
    assert "whole text" not in out
    assert main([*command, "--mechanisms", "memories"]) == 2
    assert "this model has no 'memories'; it has memory, last chunk" in capfd.readouterr().err
    for task, said in (
        ("qa1,qa9", "there is no task 'qa9'"),
        ("qa1,jsonl:", "--tasks jsonl: names no file"),
        ("qa1,multi_step_arithmetic", "'multi_step_arithmetic' has no text before its question"),
    ):
        command = ["reason", "eval", "--model", str(finished), "--tasks", task, "--lengths", "256", "--count", "2"]
        assert main(command) == 2
        captured = capfd.readouterr()
        assert said in captured.err
        assert ": 2 questions" not in captured.out + captured.err, "a task was evaluated before the names were checked"
    spaced = inside / "spaced.jsonl"  # the same documents with other white space
    spaced.write_text((inside / "questions.jsonl").read_text().replace(". ", ".  "))
    command = ["reason", "eval", "--model", str(finished), "--tasks", f"jsonl:{spaced}", "--count", "1", "--json"]
    assert main([*command, "--mechanisms", "last chunk"]) == 0
    assert "of 200 questions were trained on, and are left out" in capfd.readouterr().err


@pytest.mark.slow
def test_a_question_about_a_file_is_answered(finished: Path, inside: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A question of some 60 tokens."""
    (inside / "book.txt").write_text("The code of Dukuro is 7347. The old garden slept beside the river. " * 5)
    question = "What is the code of Dukuro, which the text names once or more often?"
    command = ["reason", "demo", "--model", str(finished), "--document", str(inside / "book.txt")]
    assert main([*command, "--question", question]) == 0
    assert "Answer from memory:" in capfd.readouterr().out


@pytest.mark.slow
def test_a_model_without_adapters_answers_from_its_carried_states(
    inside: Path, arguments: Arguments, capfd: pytest.CaptureFixture[str]
) -> None:
    root = inside / "carried"
    changes = (
        "reasoning.carry=all",
        "reasoning.plastic_lora={enabled: false}",
        "reasoning.phases.plasticity={steps: 2, episodes: 4, micro_batch: 4, train: all}",
        "reasoning.phases.imitation.steps=0",
        "reasoning.phases.policy.steps=0",
        "reasoning.agent.data=null",
    )
    assert main(["train", *arguments(*settings(inside), *changes, f"run.root={root}")]) == 0
    (run,) = root.iterdir()
    capfd.readouterr()
    questions = f"jsonl:{inside}/questions.jsonl"
    command = ["reason", "eval", "--model", str(run), "--tasks", questions, "--count", "3", "--json"]
    assert main(command) == 0
    captured = capfd.readouterr()
    assert "of 200 questions were trained on, and are left out" in captured.err
    rows = json.loads(captured.out)
    assert [row["mechanism"] for row in rows] == ["carried states", "whole text"]
    assert all(row["questions"] == 3 and row["tokens_per_second"] > 0 for row in rows)
    assert main([*command, "--mechanisms", "fast weights"]) == 2
    assert "this model has no 'fast weights'; it has carried states, whole text" in capfd.readouterr().err
