"""Multi-token prediction in training: gradients of the engine, resumed runs, measures, evaluation of depth 1 alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed, which is not installed")

from json_rows import read_metrics

from cdrmix.report.report import write_report
from cdrmix.run_folder import RunFolder
from cdrmix.training import stage_a
from cdrmix.training.console import Console

pytestmark = pytest.mark.usefixtures("own_settings")

# As in test_engine.py; the sequential depths are two further blocks, so there are twice as many sums.
TOLERANCE = 314 * 2**-24
CASES = {
    "weights whole": [
        ("maps", ["zero_stage=2"]),
        ("chain", ["zero_stage=1"]),
        ("sequential", ["zero_stage=0", "expert_parallel=2"]),
    ],
    "weights partitioned": [
        ("heads", ["zero_stage=3"]),
        ("chain", ["zero_stage=3"]),
        ("sequential", ["zero_stage=3", "activation_checkpointing=true"]),
    ],
    # Of blocks of their own, whose weights are gathered again while they are recomputed.
    "one of them": [("sequential", ["zero_stage=3", "activation_checkpointing=true"])],
}


@pytest.mark.parametrize(
    "cases", [pytest.param(name, marks=() if name == "one of them" else pytest.mark.slow) for name in CASES]
)
def test_gradients_of_two_processes_equal_plain_pytorch(work, tmp_path: Path, cases: str) -> None:
    where = tmp_path / "errors.json"
    finished = work("depths", where, processes=2, cases=json.dumps(CASES[cases]))
    assert [process.returncode for process in finished] == [0, 0], finished[0].stdout
    results = json.loads(where.read_text())
    assert len(results) == len(CASES[cases])
    for case, errors in results.items():
        assert errors["gradient"] < TOLERANCE, case
        assert errors["norm"] < TOLERANCE, case
        assert errors["weights"] < 1e-3, case  # as in test_engine.py


class Killed(Exception):
    """Stands for a process that ends without a word."""


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.prediction={tokens: 3, kind: chain, curriculum: forward, every: 2}", "train.precision=bf16"),
        ("model.prediction={tokens: 3, kind: sequential, curriculum: reverse}", "train.ema_decay=0.9"),
        ("model.prediction={tokens: 2, kind: heads, detach: true}",),
    ],
)
def test_a_run_that_is_broken_off_in_its_curriculum_has_the_same_bits(
    make_config, shards, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    config = make_config(*overrides, "train.log_every=1")
    straight, broken = (RunFolder.create(config) for _ in range(2))
    expected = stage_a.train(config, straight, shards, console=False)
    on_step = Console.on_step

    def kill(self: Console, number: int) -> None:
        on_step(self, number)
        if number == 3:
            raise Killed

    monkeypatch.setattr(Console, "on_step", kill)
    with pytest.raises(Killed):
        stage_a.train(config, broken, shards, console=False)
    monkeypatch.setattr(Console, "on_step", on_step)
    found = stage_a.train(config, broken, shards, resume="auto", console=False)
    one, other = (run / "model.safetensors" for run in (expected.checkpoint, found.checkpoint))
    assert one.read_bytes() == other.read_bytes()
    depths = [row["prediction_losses"] for row in read_metrics(straight.metrics_jsonl)]
    assert depths == [row["prediction_losses"] for row in read_metrics(broken.metrics_jsonl)]
    names = [sorted(each) for each in depths]
    if "forward" in overrides[0]:  # a third of the six steps each
        assert names == [[]] * 2 + [["2"]] * 2 + [["2", "3"]] * 2
    elif "reverse" in overrides[0]:
        assert names == [["2", "3"]] * 2 + [["2"]] * 2 + [[]] * 2
    else:
        assert names == [["2"]] * 6
    assert all(0 < nats < 2 * math.log(300) for each in depths for nats in each.values())


@pytest.mark.usefixtures("blank_pictures")
def test_validation_sees_depth_1_alone(make_config, shards) -> None:
    # With `detach` the model itself is trained as without the section, but for the norm that its gradients are clipped
    # by; a clip of 1000 never acts.
    steps = "train.gradient_clip=1000.0"
    rows = {}
    for name, overrides in (("with", ("model.prediction={tokens: 3, detach: true}",)), ("without", ())):
        config = make_config(steps, *overrides)
        run = RunFolder.create(config)
        result = stage_a.train(config, run, shards, console=False)
        rows[name] = read_metrics(run.metrics_jsonl)
        page = write_report(run).read_text(encoding="utf-8")
        assert ("Depths of multi-token prediction" in page) == (name == "with")
        assert result.valid_bits_per_byte is not None
    for one, other in zip(rows["with"], rows["without"], strict=True):
        for measure in ("valid_bits_per_byte", "valid_loss", "next_token_loss"):
            assert one[measure] == other[measure], measure
        assert one["loss"] > other["loss"]
        assert one["prediction_losses"]
        assert not other["prediction_losses"]
