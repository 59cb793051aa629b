"""`cdrmix compare` names the first step and the tensors that differ, of two runs with train.digests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from in_process import main

import cdrmix
from cdrmix.training.engine import Engine

pytestmark = pytest.mark.usefixtures("training_alone")

Arguments = Callable[..., list[str]]
NAME = "blocks.1.feed_forward.w_up"
# Without clipping: the norm of all gradients would carry a change of one to all others.
RUN = ("train.digests=true", "train.gradient_clip=1000", "train.steps=6")
STEP = 3  # that is changed


def train(arguments: Arguments, root: Path, *more: str) -> Path:
    assert main(["train", *arguments(*RUN, f"run.root={root}", *more)]) == 0
    (run,) = root.iterdir()
    return run


@pytest.fixture(scope="module")
def plain(training_alone: None, arguments: Arguments, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(arguments, tmp_path_factory.mktemp("plain"))


def rows(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "digests.jsonl").read_text().splitlines()]


def changed_at_a_step(monkeypatch: pytest.MonkeyPatch, change: Callable[[Engine], None], *, after: bool) -> None:
    step, calls = Engine.step, []

    def other(self: Engine, *arguments: float | None, **options: bool) -> bool:
        calls.append(1)
        if len(calls) == STEP and not after:
            change(self)
        applied = step(self, *arguments, **options)
        if len(calls) == STEP and after:
            change(self)
        return applied

    monkeypatch.setattr(Engine, "step", other)


def add_to_gradient(engine: Engine) -> None:
    gradient = engine.parameters[NAME].grad
    assert gradient is not None
    gradient.view(-1)[7] += 1.0


def add_to_weight(engine: Engine) -> None:
    with torch.no_grad():
        engine.parameters[NAME].view(-1)[7] += 1.0


@pytest.mark.parametrize(
    ("change", "after", "differing"),
    [(add_to_gradient, False, ["optimizer state", "weights"]), (add_to_weight, True, ["weights"])],
)
def test_the_first_step_and_tensor_are_named(
    plain: Path,
    arguments: Arguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Engine], None],
    after: bool,
    differing: list[str],
) -> None:
    changed_at_a_step(monkeypatch, change, after=after)
    changed = train(arguments, tmp_path)
    capsys.readouterr()
    assert main(["compare", str(plain), str(changed)]) == 1
    told = capsys.readouterr().out
    names = rows(plain)[0]["parameters"]
    assert isinstance(names, list)
    assert f"the first step that differs is {STEP}" in told
    found = [line for line in told.splitlines() if line.startswith(("loss: ", "optimizer state: ", "weights: "))]
    assert found == [f"{what}: 1 of {len(names)} tensors differ, the first is {NAME}" for what in differing]


class Stop(cdrmix.Callback):
    """Ends a run after a step that has no checkpoint."""

    def on_step(self, step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt


def test_a_resumed_run_has_each_step_once(plain: Path, arguments: Arguments, tmp_path: Path) -> None:
    _, path, *overrides = arguments(*RUN, f"run.root={tmp_path}")
    config = cdrmix.Config.from_yaml(path, overrides)
    with pytest.raises(KeyboardInterrupt):
        cdrmix.train(config, callbacks=[Stop()])
    (run,) = tmp_path.iterdir()
    assert [row.get("step") for row in rows(run)] == [None, 1, 2, 3]
    assert cdrmix.train(config, resume="auto") == run
    found = rows(run)
    assert [row.get("step") for row in found] == [None, 1, 2, None, 3, 4, 5, 6]
    assert [row for row in found if "step" in row] == [row for row in rows(plain) if "step" in row]


def test_without_the_key_there_is_no_file(toy_run: Path) -> None:
    assert not (toy_run / "digests.jsonl").exists()
