"""Which checkpoint is the best, and which are kept: by recorded held-out figures and by the rules, after a kill too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from json_rows import read_metrics

from cdrmix.config.schema import Config
from cdrmix.data.prepare import prepare
from cdrmix.data.shards import ShardSet
from cdrmix.errors import ConfigError
from cdrmix.inference.checkpoints import list_checkpoints, verify_checkpoint
from cdrmix.run_folder import RunFolder
from cdrmix.training.callbacks import Callback
from cdrmix.training.checkpoint import read_progress
from cdrmix.training.stage_a import train

pytestmark = pytest.mark.usefixtures("own_settings")

LONG = ("train.steps=9", "train.keep_last=1")


class Broken(Exception):
    """Stands for a process that ends without a word."""


class BreakAt(Callback):
    """Breaks the training off after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, step: int) -> None:
        if step == self._step:
            raise Broken


def steps(run: RunFolder) -> list[int]:
    return [int(path.name[5:]) for path in list_checkpoints(run.checkpoints)]


def best(run: RunFolder) -> int:
    return int((run.checkpoints / "best").read_text().strip()[5:])


def test_the_highest_is_the_best_if_the_mode_says_so(make_config: Callable[..., Config], shards: ShardSet) -> None:
    """The loss falls, so the first validation has the highest. keep_last keeps it, a kill does not forget it."""
    config = make_config(*LONG, "train.best_metric=loss", "train.best_mode=max")
    run = RunFolder.create(config)
    with pytest.raises(Broken):
        train(config, run, shards, console=False, callbacks=[BreakAt(7)])
    assert (best(run), steps(run)) == (3, [3, 6])
    (run.checkpoints / "best").unlink()  # killed between a checkpoint and its pointer
    train(config, run, shards, console=False, resume="auto")
    figures = {row["step"]: row["valid_loss"] for row in read_metrics(run.metrics_jsonl) if row["valid_loss"]}
    assert sorted(figures) == [3, 6, 9]
    assert figures[3] == max(figures.values())
    assert (best(run), steps(run)) == (3, [3, 9])
    assert read_progress(list_checkpoints(run.checkpoints)[-1]).best_value == figures[3]
    verify_checkpoint(run.checkpoints / "step-00000003")


def test_each_nth_step_is_kept_for_good(make_config: Callable[..., Config], shards: ShardSet) -> None:
    config = make_config(*LONG, "train.keep_every=5", "train.evaluate_every=9")
    run = RunFolder.create(config)
    train(config, run, shards, console=False)
    assert steps(run) == [5, 9]  # 5 is not a multiple of checkpoint_every=2, and is written too
    assert config.hash() == make_config(*LONG, "train.evaluate_every=9").hash()


@pytest.fixture
def two_domains(config_file: Path, tmp_path: Path) -> Callable[..., Config]:
    """The tiny configuration on two domains; the held-out rows of `odd` come after those of `even`."""
    content: dict[str, Any] = yaml.safe_load(config_file.read_text())
    (texts,) = map(Path, content["data"].pop("source")["paths"])
    domains = {}
    for name, rest in (("even", 0), ("odd", 1)):
        (tmp_path / name).mkdir()
        for path in texts.iterdir():
            if int(path.stem) % 2 == rest:
                (tmp_path / name / path.name).write_bytes(path.read_bytes())
        domains[name] = {"source": {"kind": "text", "paths": [str(tmp_path / name)]}}
    content["data"] |= {"domains": domains, "valid_fraction": 0.5, "workers": 1}
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump(content))
    return lambda *overrides: Config.from_yaml(path, overrides)


def test_the_figure_may_be_of_a_domain(two_domains: Callable[..., Config]) -> None:
    config = two_domains(*LONG, "train.best_metric=bits_per_byte/odd", "train.best_mode=max")
    shards = prepare(config, say=lambda text: None)
    run = RunFolder.create(config)
    train(config, run, shards, console=False)
    figures = {row["step"]: row["valid_domains"].get("odd") for row in read_metrics(run.metrics_jsonl)}
    measured = {step: figure for step, figure in figures.items() if figure is not None}
    assert len(measured) == 3
    assert best(run) == max(measured, key=lambda step: measured[step])
    assert read_progress(list_checkpoints(run.checkpoints)[-1]).best_value == max(measured.values())
    config = two_domains("train.best_metric=bits_per_byte/odd", "train.evaluate_rows=1")
    with pytest.raises(ConfigError, match=r"none of the 1 held-out rows .* is of that domain"):
        train(config, RunFolder.create(config), shards, console=False)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.best_metric=bits_per_bite", "bits_per_byte, loss\n    did you mean bits_per_byte"),
        ("train.best_metric=bits_per_byte/odd", "loss; the bits per byte of a domain need several domains"),
        ("train.best_metric=accuracy", "a figure that the validations measure: bits_per_byte, loss"),
    ],
)
def test_a_figure_that_nobody_measures_is_refused_at_once(
    make_config: Callable[..., Config], override: str, told: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make_config(override)
    assert told in str(refused.value)


def test_a_domain_that_does_not_exist_is_refused_at_once(two_domains: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match="did you mean bits_per_byte/even"):
        two_domains("train.best_metric=bits_per_byte/evan")
