"""Plugins: a run uses mixer, feed-forward, operator, task, source, optimizer and evaluation of a distribution."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import main

from cdrmix.errors import ConfigError, PluginError

PLUGIN = """
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from cdrmix.data.sources.base import SOURCES, Record, Source
from cdrmix.data.tasks.example import ANSWER, Example, Length, task
from cdrmix.data.tasks.rng import Rng
from cdrmix.eval.evaluation import EVALUATIONS, Question
from cdrmix.model.feed_forward.moe import FEED_FORWARDS, FedForward
from cdrmix.model.mixers.base import MIXERS, Mixed, Mixer
from cdrmix.ops.operator import operator
from cdrmix.training.optim import OPTIMIZERS


@MIXERS("pointwise")
class Pointwise(Mixer):
    part = "pointwise"

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.output = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Any, context: Any, cache: Any) -> Mixed:
        return Mixed(self.projected("output", x, context))


@operator("toy::softsign")
def softsign(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + x.abs())


@softsign.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def keep(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def differentiate(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return dy / (1 + x.abs()) ** 2


softsign.register_autograd(differentiate, setup_context=keep)


@FEED_FORWARDS("softsign")
class Softsign(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, config.feed_forward.hidden, bias=False)
        self.down = nn.Linear(config.feed_forward.hidden, config.d_model, bias=False)

    def forward(self, x: Any, context: Any, cache_BD: Any) -> FedForward:
        return FedForward(self.down(softsign(self.up(x))))


@task("backwards", Length())
def backwards(rng: Rng, difficulty: Length) -> Example:
    word = "".join(rng.choice("abcdefgh") for _ in range(difficulty.characters // 4))
    return Example(f"Word: {word}\\n{ANSWER}", "", f" {word[::-1]}")


@SOURCES("counting")
class Counting(Source):
    kind = "counting"

    def __init__(self, section: Any, max_expansion: int = 1) -> None:
        self.count = section.options["count"]
        self.parse = parse

    def identity(self) -> list[Any]:
        return [self.count]

    def describe(self) -> str:
        return f"{self.count} numbers"

    def parts(self) -> list[str]:
        return ["numbers"]

    def records(self, part: str, checkpoint: Any = None) -> Iterator[Record]:
        for number in range(1, self.count + 1):
            yield Record(number, number, 10)


def parse(raw: int) -> tuple[str, dict[str, Any]]:
    return f"The number {raw} comes before {raw + 1}. " * 5, {}


@EVALUATIONS("next_number")
def next_number(seed: int, number: int, characters: int) -> Question:
    prompt = " ".join(map(str, range(characters // 3)))
    return Question(prompt, f" {characters // 3}", lambda answer: float(answer.strip() == str(characters // 3)))


@OPTIMIZERS("nadam")
def nadam(groups: list[dict[str, Any]], train: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(groups, lr=train.learning_rate)
"""
OVERRIDES = (
    "model.layers=3",
    "model.mixer_layers={pointwise: [1]}",
    "model.feed_forward.kind=softsign",
    "train.steps=2",
    "train.warmup_steps=0",
    "train.optimizer=nadam",
    "data.source=null",
    "data.domains={numbers: {source: {kind: plugin, name: counting, options: {count: 60}}}, "
    "tasks: {source: {kind: tasks, tasks: [backwards], documents: 20, characters: 100}}}",
)


NAMES = """
from cdrmix.data.sources.base import SOURCES
from cdrmix.data.tasks.example import Length, task
from cdrmix.model.mixers.base import MIXERS
from cdrmix.training.optim import OPTIMIZERS

MIXERS("pointwise")(object)
OPTIMIZERS("nadam")(object)
SOURCES("counting")(object)
task("backwards", Length())(lambda rng, difficulty: None)
"""


def cdrmix(environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from cdrmix.cli import main; sys.exit(main())", *options]
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True)


@pytest.mark.long
def test_a_run_uses_the_entries_of_a_plugin(
    tmp_path: Path, arguments: Callable[..., list[str]], install_plugin: Callable[..., dict[str, str]]
) -> None:
    environment = install_plugin(tmp_path, PLUGIN)
    runs = tmp_path / "runs"
    done = cdrmix(environment, "train", *arguments(*OVERRIDES, f"run.root={runs}", f"data.cache={tmp_path / 'cache'}"))
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = runs.glob("*-*")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    said = cdrmix(environment, "params", *arguments(*OVERRIDES))
    assert said.returncode == 0, said.stderr
    assert "pointwise" in said.stdout
    generated = cdrmix(environment, "generate", "--model", str(run), "--prompt", "The", "--max-new-tokens", "2")
    assert generated.returncode == 0, generated.stderr
    tasks = ("--tasks", "backwards,next_number", "--lengths", "128", "--count", "2", "--json")
    evaluated = cdrmix(environment, "eval", "--model", str(run), *tasks)
    assert evaluated.returncode == 0, evaluated.stderr
    assert {"backwards", "next_number"} <= {score["name"] for score in json.loads(evaluated.stdout)["scores"]}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "model.mixer_layers={pointwize: [1]}",
            "model.mixer_layers.pointwize: unknown mixer\n"
            "    allowed: one of the mixers attention, rwkv7, mamba2, routing_mamba, pointwise\n"
            "    did you mean model.mixer_layers.pointwise?",
        ),
        ("train.optimizer=nadams", 'found "nadams" (a string)\n    allowed: one of adamw, muon, nadam\n'),
        ("data.source={kind: plugin, name: count}", "data.source.name: unknown source 'count'; known: "),
        ("data.source={kind: tasks, tasks: [backward], documents: 1}", "did you mean 'backwards'?"),
    ],
)
def test_a_name_that_no_plugin_registers_is_refused(
    arguments: Callable[..., list[str]],
    install_here: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    override: str,
    message: str,
) -> None:
    install_here(NAMES)
    assert main(["train", *arguments(override)]) == ConfigError.exit_code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "entry", "reason"),
    [
        ("raise OSError('no such device')", "toy_plugin", "failed with OSError: no such device"),
        ("def start():\n    raise KeyError('x')", "toy_plugin:start", "failed with KeyError: 'x'"),
        ("start = 3", "toy_plugin:start", "is neither a module nor a function, but int"),
        ("", "toy_plugin:start", "failed with AttributeError: module 'toy_plugin' has no attribute 'start'"),
    ],
)
def test_a_broken_plugin_is_named(
    arguments: Callable[..., list[str]],
    install_here: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    module: str,
    entry: str,
    reason: str,
) -> None:
    install_here(module, entry)
    assert main(["validate", *arguments()]) == PluginError.exit_code
    error = capsys.readouterr().err
    assert f"the plugin 'toy' = '{entry}' of the distribution toy-distribution 1.2 {reason}" in error
