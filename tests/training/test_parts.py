"""Training on several parts of the loss: the formula, micro-batches, processes, resuming, records, report."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from json_rows import read_metrics

from cdrmix.config.schema import Config
from cdrmix.data.loader import EvalLoader, train_loader
from cdrmix.data.objectives import PARTS
from cdrmix.data.prepare import prepare
from cdrmix.data.shards import open_shards
from cdrmix.inference.checkpoints import newest_whole_checkpoint, read_weights
from cdrmix.records import StepRecord
from cdrmix.report.report import write_report
from cdrmix.run_folder import RunFolder
from cdrmix.runtime import restored_settings
from cdrmix.training.build import build_loss_model
from cdrmix.training.metrics import scalars
from cdrmix.training.stage_a import train

pytestmark = pytest.mark.usefixtures("own_settings")

WEIGHTS = {"next_token": 1.0, "fim": 0.3, "cot": 0.2}
QUIET = ("model.feed_forward.load_balance_weight=0.0", "model.feed_forward.z_loss_weight=0.0")


@pytest.fixture(scope="module")
def parted_file(config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny configuration with sixty plain texts and sixty with chains of thought, and all three parts."""
    folder = tmp_path_factory.mktemp("parts")
    content = yaml.safe_load(config_file.read_text())
    texts = [f"the loop reads row {number} and adds {number * number}\n" * (1 + number % 3) for number in range(60)]
    texts += [f"what is {n} and 1?\n<think>{n} and 1 is {n + 1}.</think>\nAnswer: {n + 1}\n" for n in range(60)]
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    content["data"] |= {
        "source": {"kind": "jsonl", "paths": [str(corpus)]},
        "dedup": {"near_duplicates": False},
        "cache": str(folder / "cache"),
        "workers": 1,
        "objectives": {"weights": WEIGHTS, "fim": {"rate": 0.5}, "cot": {"max_share": 1.0}},
    }
    content["run"] |= {"root": str(folder / "runs")}
    path = folder / "parted.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def parted(parted_file: Path) -> Callable[..., Config]:
    return lambda *overrides: Config.from_yaml(parted_file, overrides)


@pytest.fixture(scope="module")
def parted_folder(parted: Callable[..., Config]) -> Path:
    return prepare(parted(), say=lambda _: None).path


@pytest.fixture
def trained(parted: Callable[..., Config], parted_folder: Path) -> Callable[..., RunFolder]:
    """Trains with overrides in a new run folder, or goes on in one."""

    def run(*overrides: str, folder: RunFolder | None = None) -> RunFolder:
        config = parted(*overrides)
        made = RunFolder.create(config) if folder is None else folder
        train(config, made, open_shards(parted_folder), resume=None if folder is None else "auto", console=False)
        return made

    return run


@pytest.fixture(scope="module")
def straight(parted: Callable[..., Config], parted_folder: Path) -> RunFolder:
    """A run of four steps, which the tests only read."""
    config = parted("train.steps=4")
    run = RunFolder.create(config)
    with restored_settings():
        train(config, run, open_shards(parted_folder), console=False)
    return run


@pytest.mark.parametrize("normalise", ["mean_of_tokens", "sum_of_means"])
def test_one_pass_is_three_passes(parted: Callable[..., Config], parted_folder: Path, normalise: str) -> None:
    """Losses and gradients of all parts at once against a pass for each, in float64.

    The weights of tokens are float32: the factor of a part is rounded once, 2^-24.
    """
    config = parted(*QUIET, f"data.objectives.normalise={normalise}")
    torch.manual_seed(1)
    model = build_loss_model(config).double()
    (batch,) = train_loader(config, open_shards(parted_folder).train).micro_batches(0)
    assert [part.name for part in batch.parts] == [*PARTS]
    assert batch.parts_BT is not None
    inputs = batch.ids_BT, batch.targets_BT
    model.eval()
    weights_PBT = batch.part_weights([part.number for part in batch.parts]).double()
    losses = model(*inputs, weights_PBT, batch.cu_seqlens_N, batch.token_count, 1.0, None, True)
    losses.total.backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()

    filled = batch.weights_BT > 0
    sums, counts = {}, {}
    for number, name in enumerate(PARTS):
        ones_BT = (filled & (batch.parts_BT == number)).double()
        alone = model(*inputs, ones_BT, batch.cu_seqlens_N, 1.0, 1.0)
        sums[name], counts[name] = alone.next_token_sum, float(ones_BT.sum())
    for part, nats in zip(batch.parts, losses.next_token_sum.tolist(), strict=True):
        assert part.tokens == counts[part.name]
        assert nats / part.factor == pytest.approx(sums[part.name].item(), rel=2**-23)
    if normalise == "mean_of_tokens":
        expected = sum(WEIGHTS[name] * sums[name] for name in PARTS)
        expected = expected / sum(WEIGHTS[name] * counts[name] for name in PARTS)
    else:
        expected = sum(WEIGHTS[name] / counts[name] * sums[name] for name in PARTS)
    assert losses.total.item() == pytest.approx(expected.item(), rel=2**-23)
    expected.backward()
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            largest = weight.grad.abs().max().item()
            # the rounding of the three factors, and float64 sums
            torch.testing.assert_close(found[name], weight.grad, rtol=0, atol=largest * 2**-21 + 1e-15)


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_figures_do_not_depend_on_micro_batches_and_processes(
    trained: Callable[..., RunFolder],
    work: Callable[..., list[Any]],
    parted_file: Path,
    parted_folder: Path,
    tmp_path: Path,
    processes: int,
) -> None:
    once, cut = (*QUIET, "train.steps=1", "train.warmup_steps=0"), "train.micro_batch_rows=2"
    kinds = {name: f"data.objectives.normalise={name}" for name in ("mean_of_tokens", "sum_of_means")}
    runs = json.dumps({name: [kind] for name, kind in kinds.items()})
    options = {"config": str(parted_file), "shards": str(parted_folder), "runs": runs}
    finished = work("several", tmp_path / "runs", *once, cut, processes=processes, **options)
    assert [process.returncode for process in finished] == [0] * processes, finished[0].stdout
    for normalise, kind in kinds.items():
        whole = read_metrics(trained(*once, kind).metrics_jsonl)[0]
        rows = {
            "cut": read_metrics(trained(*once, kind, cut).metrics_jsonl)[0],
            "shared": read_metrics(tmp_path / "runs" / normalise / "metrics.jsonl")[0],
        }
        tolerance = 222 * 2**-24  # as in test_engine.py
        for name, row in rows.items():
            for key in ("loss", "next_token_loss", "gradient_norm"):
                assert row[key] == pytest.approx(whole[key], rel=tolerance), (normalise, name, key)
            for key in ("parts", "valid_parts"):
                assert row[key] == pytest.approx(whole[key], rel=tolerance), (normalise, name, key)
                assert set(row[key]) == set(PARTS)
            assert row["tokens"] == whole["tokens"]
        alone = whole["parts"]
        if normalise == "sum_of_means":
            assert whole["loss"] == pytest.approx(sum(WEIGHTS[name] * alone[name] for name in PARTS), rel=1e-5)


def test_a_resumed_run_has_the_bits_of_an_unbroken_one(
    trained: Callable[..., RunFolder], straight: RunFolder, tmp_path: Path
) -> None:
    broken = RunFolder.open(shutil.copytree(straight.path, tmp_path / "broken"))
    newest = broken.checkpoints / "step-00000004"
    (newest / "model.safetensors").write_bytes(b"")  # the run goes on from step 2
    resumed = trained("train.steps=4", folder=broken)
    found, expected = (read_weights(newest_whole_checkpoint(run.checkpoints)) for run in (resumed, straight))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert [row["parts"] for row in read_metrics(resumed.metrics_jsonl)] == [
        row["parts"] for row in read_metrics(straight.metrics_jsonl)
    ]
    assert (
        read_metrics(resumed.metrics_jsonl)[-1]["valid_parts"]
        == read_metrics(straight.metrics_jsonl)[-1]["valid_parts"]
    )


def test_equal_weights_are_the_plain_loss(
    parted: Callable[..., Config], parted_folder: Path, trained: Callable[..., RunFolder]
) -> None:
    """With weights of 1 the mean over tokens is that of a batch without parts; bits per byte never have weights."""
    equal = "data.objectives.weights={next_token: 1.0, fim: 1.0, cot: 1.0}"
    run = trained(equal, "train.steps=1", "train.warmup_steps=0", *QUIET)
    row = read_metrics(run.metrics_jsonl)[0]
    config = parted(equal, *QUIET)
    (batch,) = train_loader(config, open_shards(parted_folder).train).micro_batches(0)
    assert set(batch.weights_BT.unique().tolist()) <= {0.0, 1.0}
    assert row["loss"] == pytest.approx(row["next_token_loss"], rel=1e-6)
    checkpoint = newest_whole_checkpoint(run.checkpoints)
    assert checkpoint is not None
    model = build_loss_model(config)
    model.language_model.load_state_dict(read_weights(checkpoint), strict=False)
    loader = EvalLoader(open_shards(parted_folder).valid, config.data.row_length, 4, config.train.evaluate_rows)
    with torch.no_grad():
        nats = sum(
            model.eval()(b.ids_BT, b.targets_BT, b.weights_BT, b.cu_seqlens_N, 1.0).next_token_sum.item()
            for b in loader
        )
    assert row["valid_bits_per_byte"] == pytest.approx(nats / math.log(2) / loader.text_bytes, rel=1e-5)


def test_a_part_of_weight_0_is_not_trained_on(parted: Callable[..., Config], parted_folder: Path) -> None:
    config = parted("data.objectives.weights={fim: 0.0}")
    (batch,) = train_loader(config, open_shards(parted_folder).train).micro_batches(0)
    assert batch.parts_BT is not None
    assert [part.name for part in batch.parts] == ["next_token", "cot"]
    assert not batch.weights_BT[batch.parts_BT == PARTS.index("fim")].any()
    assert batch.token_count == sum(part.tokens for part in batch.parts)


@pytest.mark.usefixtures("blank_pictures")
def test_the_report_and_the_trackers_have_the_parts(straight: RunFolder, tmp_path: Path) -> None:
    run = RunFolder.open(shutil.copytree(straight.path, tmp_path / "run"))
    report = write_report(run).read_text()
    assert "Parts of the loss, nats per token" in report
    assert all(f"<td>{name}</td>" in report for name in PARTS)
    row = read_metrics(run.metrics_jsonl)[-1]
    record = StepRecord(**{name: value for name, value in row.items() if name in StepRecord.__dataclass_fields__})
    assert scalars(record)["parts/cot"] == row["parts"]["cot"]
    assert scalars(record)["valid_parts/fim"] == row["valid_parts"]["fim"]
