"""The ladder's configurations and the command that compares them: names, published table, widths, tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cdrmix import cli
from cdrmix.config.autosizers import SCALES
from cdrmix.config.schema import Config
from cdrmix.data.curriculum import Mixture
from cdrmix.data.shards import Stratum
from cdrmix.gpus import gpu_by_key
from cdrmix.ladder.comparison import compare
from cdrmix.ladder.rungs import plan_rungs, read_ladder
from cdrmix.plan.flops import training_flops_per_token
from cdrmix.plan.parameters import count_parameters, nominal

ROOT = Path(__file__).parents[2]
LADDER = ROOT / "configs" / "ladder"
SIZES = ("50m", "125m", "500m", "1b", "3b", "7b", "13b")
NAMED = [f"{family}-{size}" for family in ("dense", "hybrid") for size in SIZES]
MICRO = {"micro-300k": 3e5, "micro-1m": 1e6, "micro-3m": 3e6, "micro-10m": 1e7}
LADDERS = ("micro", "two-rungs")
ROWS = (2048, 4096, 4096, 8192, 8192, 8192, 8192)  # the specification's context lengths
# Of the dense ladder with rows of 2,048, for each size: parameters, GFLOP a token, tokens, operations, GB at 16 bytes a
# parameter, learning rate, tokens of a step, hours of an H200 at 40 %. Computed apart from this code, with 20 tokens a
# parameter and StepLaw, and rounded to the digits given.
PUBLISHED = {
    "50m": (49.9e6, 0.35, 1.0e9, 3.5e17, 0.8, 5.7e-3, 80e3, 0.2),
    "125m": (124.7e6, 0.86, 2.5e9, 2.2e18, 2.0, 3.0e-3, 135e3, 1.5),
    "500m": (501e6, 3.31, 10e9, 3.3e19, 8.0, 1.4e-3, 298e3, 23),
    "1b": (997e6, 6.51, 20e9, 1.3e20, 15.9, 1.1e-3, 441e3, 91),
    "3b": (3.01e9, 19.1, 60e9, 1.2e21, 48, 6.6e-4, 829e3, 805),
    "7b": (7.01e9, 43.7, 140e9, 6.1e21, 112, 4.6e-4, 1.34e6, 4300),
    "13b": (13.0e9, 80.5, 260e9, 2.1e22, 208, 3.6e-4, 1.91e6, 14700),
}


@pytest.mark.parametrize("path", sorted(LADDER.rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_configuration_of_the_ladder_loads(path: Path) -> None:
    assert path.read_text().startswith("# ")
    if path.parent == LADDER and path.stem in LADDERS:
        rungs = plan_rungs(*read_ladder(path))
        assert [rung.name for rung in rungs] == [name for name in MICRO if name in [each.name for each in rungs]]
    elif path.parent == LADDER:
        assert Config.from_yaml(path).run.name == path.stem


@pytest.mark.parametrize("name", [*NAMED, *MICRO])
def test_the_names_are_true_within_1_percent(name: str) -> None:
    config = Config.from_yaml(LADDER / f"{name}.yaml")
    model = config.cdrmix_model
    count = count_parameters(model)
    assert count.total_stored == count.total_active
    assert count.total_stored == pytest.approx(MICRO.get(name) or nominal(name), rel=0.01)
    attention = model.mixers.count("attention")
    assert attention == (model.layers if name.startswith("dense") else model.layers // 4)
    assert {*model.mixers} <= {"attention", "rwkv7"}
    assert (model.feed_forward.kind, model.feed_forward.activation, model.norm) == ("dense", "swiglu", "rmsnorm")


@pytest.mark.parametrize("name", NAMED)
def test_the_rungs_are_the_specification_s(name: str) -> None:
    config = Config.from_yaml(LADDER / f"{name}.yaml")
    model, index = config.cdrmix_model, SIZES.index(name.partition("-")[2])
    assert model.d_model == (512, 768, 1024, 1536, 2560, 4096, 5120)[index]
    assert model.layers == (8, 12, 24, 28, 32, 32, 40)[index]
    assert model.attention.heads == (8, 12, 16, 12, 20, 32, 40)[index]
    assert model.attention.kv_heads == (2, 4, 4, 4, 4, 8, 8)[index]
    assert config.data.row_length == ROWS[index]
    assert model.embedding_norm == name.startswith("hybrid")
    assert config.train.batch_rows % 8 == 0  # eight processes can share out a step


@pytest.mark.parametrize("name", NAMED)
def test_the_widths_are_solved(name: str) -> None:
    """No other multiple of 64 is nearer to the width at which the parameters would be exactly the name's."""
    model = Config.from_yaml(LADDER / f"{name}.yaml").cdrmix_model

    def parameters(hidden: int) -> int:
        narrow = model.model_copy(update={"feed_forward": model.feed_forward.model_copy(update={"hidden": hidden})})
        return count_parameters(narrow).total_stored

    of_one = (parameters(128) - parameters(64)) / 64
    exact = 64 + (nominal(name) - parameters(64)) / of_one
    assert SCALES[name].hidden == 64 * round(exact / 64)  # type: ignore[index]


def ladder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> list[dict[str, float]]:
    monkeypatch.chdir(ROOT)
    assert cli.main(["ladder", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["rungs"]
    assert isinstance(found, list)
    return found


def test_the_dense_ladder_is_the_published_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rungs = ladder(monkeypatch, capsys, "--families", "dense", "--row-length", "2048")
    assert [rung["name"] for rung in rungs] == [f"dense-{size}" for size in SIZES]
    for rung, expected in zip(rungs, PUBLISHED.values(), strict=True):
        columns = ("parameters", "flops_per_token", "tokens", "compute", "state_bytes", "learning_rate")
        scales = (1, 1e9, 1, 1, 1e9, 1)
        for column, scale, value in zip(columns, scales, expected, strict=False):
            assert rung[column] / scale == pytest.approx(value, rel=0.05), (rung["name"], column)
        # Rows are rounded to multiples of 8; the table has the law's own number.
        assert rung["batch_tokens"] == pytest.approx(expected[6], rel=0.03)
        assert rung["hours"] == pytest.approx(expected[7], rel=0.1, abs=0.05)
        assert rung["compute"] == rung["flops_per_token"] * rung["tokens"]


def test_the_table_has_both_families_and_agrees_with_params(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rungs = {rung["name"]: rung for rung in ladder(monkeypatch, capsys)}
    assert list(rungs) == NAMED
    for name in ("dense-125m", "hybrid-125m"):
        path = LADDER / f"{name}.yaml"
        assert cli.main(["params", "--config", str(path)]) == 0
        assert f"{rungs[name]['parameters']:,}" in capsys.readouterr().out
        config = Config.from_yaml(path)
        assert rungs[name]["flops_per_token"] == training_flops_per_token(config).total
        assert rungs[name]["tokens"] == pytest.approx(20 * rungs[name]["active_parameters"], rel=1e-3)
        assert (rungs[name]["learning_rate"], rungs[name]["steps"]) == (config.train.learning_rate, config.train.steps)
    assert rungs["hybrid-7b"]["flops_per_token"] < rungs["dense-7b"]["flops_per_token"]  # at 8,192 tokens


def test_options_of_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--config", "configs/cdrmix-core-tiny.yaml", "--config", "configs/ladder/micro-1m.yaml"]
    assert [rung["name"] for rung in ladder(monkeypatch, capsys, *tiny)] == ["cdrmix-core-tiny", "micro-1m"]
    micro = tiny[2:]
    (law,), (table,) = (ladder(monkeypatch, capsys, *micro, *more) for more in ([], ["--hyperparameters", "svend"]))
    assert (table["learning_rate"], table["batch_tokens"]) == (3e-4, 32 * 256)
    (twice,) = ladder(monkeypatch, capsys, *micro, "--tokens-per-parameter", "3")
    assert twice["tokens"] == pytest.approx(2 * law["tokens"], rel=0.01)
    (slow,) = ladder(monkeypatch, capsys, *micro, "--gpu", "a100", "--mfu", "0.2")
    assert slow["hours"] == pytest.approx(law["hours"] * 989.4 / 312 * 2, rel=1e-9)
    assert cli.main(["ladder", *micro]) == 0
    assert "micro-1m" in capsys.readouterr().out


def test_bad_options_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["ladder"]) == 2
    assert "no files configs/ladder/dense-*.yaml here" in capsys.readouterr().err
    assert cli.main(["ladder", "--families", "big"]) == 2
    assert "allowed: dense, hybrid, micro" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["ladder", "--mfu", "1.5"])
    assert "above 0 and of at most 1" in capsys.readouterr().err


def test_a_model_of_transformers_is_no_rung(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ladder", "--config", str(ROOT / "configs" / "cpt-tiny.yaml")]) == 2
    assert "model.kind: cdrmix" in capsys.readouterr().err


# 10^9 tokens of each part of the standard curriculum, as its comments give them.
TOKENS = {"web": 13.9, "wiki": 14.0, "papers": 39.4, "forum": 22, "books": 4.8, "code": 62.3}


@pytest.mark.parametrize("name", ["dense-13b", "hybrid-13b"])
def test_the_largest_rungs_go_through_no_part_too_often(name: str) -> None:
    config = Config.from_yaml(LADDER / f"{name}.yaml")
    data = config.data
    assert data.domains is not None
    strata, first = [], 0
    for domain in data.domains:
        rows = int(TOKENS[domain] * 1e9 / data.row_length)
        strata.append(Stratum(domain, 0, first, rows, 0, 0))
        first += rows
    limits = {domain: section.max_epochs for domain, section in data.domains.items() if section.max_epochs is not None}
    key, stages = data.stages()
    total = config.train.steps * config.train.batch_rows
    Mixture(stages, strata, total_rows=total, seed=1, limits=limits, name=key)  # raises if a part is read too often


def test_tests_and_production_are_parts_of_a_ladder() -> None:
    quick, scale, production = (
        Config.from_yaml(LADDER / f"{name}.yaml") for name in ("quick-test", "scale-test", "production")
    )
    assert quick.train.steps == 100
    assert scale.train.steps <= 1000
    rung = Config.from_yaml(LADDER / "dense-125m.yaml").train
    assert (scale.train.batch_rows, scale.train.learning_rate) == (rung.batch_rows, rung.learning_rate)
    assert production.train.steps * production.train.batch_rows * 8192 == pytest.approx(20e9, rel=0.01)
    assert production.train.ema_decay == pytest.approx(1 - 1 / (0.05 * production.train.steps), abs=5e-5)


def test_tokens_and_hours_are_those_that_a_batch_warm_up_leaves() -> None:
    path = LADDER / "micro-1m.yaml"
    constant = Config.from_yaml(path).train
    micro = constant.micro_batch_rows
    assert constant.batch_rows > micro
    fixed = [f"train.steps={constant.steps}", f"train.batch_rows={constant.batch_rows}"]
    warmup = f"train.batch_warmup={{rows: {micro}, steps: {constant.steps // 2}}}"
    gpu = gpu_by_key("h200")
    assert gpu is not None
    (plain,), (grown,) = (compare([path], overrides, gpu, 0.4) for overrides in (fixed, [*fixed, warmup]))
    rows = Config.from_yaml(path, [*fixed, warmup]).train.batch_sizes.before(constant.steps)
    assert grown.tokens == rows * grown.row_length < plain.tokens
    assert grown.batch_tokens == plain.batch_tokens
    assert grown.hours / plain.hours == pytest.approx(grown.tokens / plain.tokens)
