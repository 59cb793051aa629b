"""Inheritance, overrides, the rules by which YAML is read, and the way back to YAML."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from cdrmix.config.schema import Config
from cdrmix.config.schema_data import HuggingFaceSource, JsonlSource, StdlibSource, TextSource
from cdrmix.errors import ConfigError

GOOD = """\
model: {d_model: 128, layers: 4, attention: {heads: 4}, feed_forward: {hidden: 256}}
train: {steps: 500, batch_rows: 8, micro_batch_rows: 8, learning_rate: 3e-3}
"""


def write(folder: Path, **files: str) -> Path:
    """Files named by their stem; the path of the last one."""
    for name, text in files.items():
        path = folder / f"{name}.yaml"
        path.write_text(text)
    return path


def load(folder: Path, text: str = "", *overrides: str) -> Config:
    return Config.from_yaml(write(folder, run=GOOD + text), overrides)


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_yaml(path, overrides)
    return str(caught.value).replace(f"{path.parent}/", "")


def test_three_levels_merge_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "deep.yaml").write_text(GOOD + "run: {seed: 7, name: deep}\n")
    (tmp_path / "shared" / "middle.yaml").write_text("base: deep.yaml\nrun: {name: middle}\ntrain: {steps: 600}\n")
    path = write(tmp_path, top="base: shared/middle.yaml\ntrain: {betas: [0.8, 0.9]}\n")
    config = Config.from_yaml(path)
    assert (config.run.seed, config.run.name) == (7, "middle")
    assert (config.train.steps, config.train.betas, config.train.batch_rows) == (600, (0.8, 0.9), 8)


def test_a_problem_is_shown_in_the_file_that_wrote_it(tmp_path: Path) -> None:
    path = write(tmp_path, low=GOOD + "run:\n  seed: -1\n", top="base: low.yaml\nrun: {name: x}\n")
    assert "\nlow.yaml:4: run.seed: found -1" in message(path)
    # the heir's value covers it
    assert Config.from_yaml(write(tmp_path, top="base: low.yaml\nrun: {seed: 1}\n")).run.seed == 1


def test_what_a_section_lacks_is_shown_in_the_heir(tmp_path: Path) -> None:
    low = GOOD.replace("steps: 500, ", "")
    path = write(tmp_path, low=low, top="# top\nbase: low.yaml\ntrain:\n  weight_decay: 0\n")
    assert "\ntop.yaml:3: train.steps: missing" in message(path)
    # an override has no section to show
    assert "\ntop.yaml:3: train.steps: missing" in message(path, "train.weight_decay=0.1")


def test_circles_are_refused_with_the_chain(tmp_path: Path) -> None:
    path = write(tmp_path, c="run: {}\nbase: a.yaml\n", b="base: c.yaml\n", a="base: b.yaml\n")
    headline, problem, *_ = message(path).splitlines()
    assert headline == "the configuration has one problem:"
    assert problem == "c.yaml:2: base: inherits in a circle: a.yaml -> b.yaml -> c.yaml -> a.yaml"


def test_a_file_that_inherits_from_itself_under_another_name(tmp_path: Path) -> None:
    path = write(tmp_path, a="base: b.yaml\n")
    (tmp_path / "b.yaml").symlink_to(path)
    assert "b.yaml:1: base: inherits in a circle" in message(path) or "a.yaml:1: base: inherits in a" in message(path)


def test_a_base_that_is_not_there(tmp_path: Path) -> None:
    path = write(tmp_path, shared=GOOD, a="run: {}\nbase: shard.yaml\ntrain: {steps: x}\n")
    said = message(path)
    assert "\na.yaml:2: base: shard.yaml: no such file\n    did you mean shared.yaml?" in said
    assert "\na.yaml:3: train.steps: found" in said
    assert "missing" not in said  # the rest may stand in the file that could not be read


@pytest.mark.parametrize("base", ["3", "[a.yaml]", "''", "{}"])
def test_a_base_that_is_no_path(base: str, tmp_path: Path) -> None:
    assert "\na.yaml:1: base: found " in message(write(tmp_path, a=f"base: {base}\n"))


@pytest.mark.parametrize("base", ['"a\\0b"', ".", "a/b", "'" + "a" * 5000 + "'", "loop.yaml"])
def test_a_base_that_is_no_file(base: str, tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    headline, problem, *_ = message(write(tmp_path, a=f"base: {base}\n")).splitlines()
    assert headline == "the configuration has one problem:"
    assert problem.startswith("a.yaml:1: base: ")


@pytest.mark.parametrize(
    "secret",
    [
        "root:x:0:0:secret:/root:/bin/sh\nother:secret:1:1::/:/bin/sh\n",
        "secret: secret\npassword: secret\n",
        "[secret]\nsecret = secret\n",
        "- secret\n",
        "secret",
        "'secret",
        "*secret",
        "a: !secret secret\n",
        "&secret a: &secret b\n",
        '"secret \\q"',
        "%secret secret\n---\n",
        "%YAML secret\n---\n",
        "a: b: secret\n",
        "a:\n\tsecret: secret\n",
        "? secret\n: secret\n? secret\n: secret\n",
        "{secret: secret,\nsecret",
        "secret\n\x01secret",
        "- !!binary secret",
        "[secret]: secret",
        "secret: &a [*a, *a]",
    ],
)
@pytest.mark.parametrize("where", ["base", "itself", "snapshot"])
def test_no_line_of_a_file_that_is_no_configuration_is_shown(where: str, secret: str, tmp_path: Path) -> None:
    """It may be a file of the system, named by a configuration that comes from elsewhere."""
    (tmp_path / "shadow").write_text(secret)
    path = tmp_path / "shadow"
    if where == "snapshot":
        path = tmp_path / "config_snapshot.yaml"
        path.symlink_to("shadow")
    if where == "base":
        path = write(tmp_path, a="base: shadow\nrun: {}\n")
    with pytest.raises(ConfigError) as raised:
        Config.from_yaml(path)
    assert "secret" not in str(raised.value).replace(str(tmp_path), "")
    assert re.search(r"(shadow|config_snapshot.yaml):[0-9]+: ", str(raised.value))


def test_a_snapshot_inherits_from_no_file(tmp_path: Path) -> None:
    write(tmp_path, shared=GOOD)
    path = tmp_path / "config_snapshot.yaml"
    path.write_text("run: {name: a}\nbase: shared.yaml\n")
    with pytest.raises(ConfigError, match=r"config_snapshot\.yaml:2: base: a snapshot inherits from no file"):
        Config.from_yaml(path)


def test_syntax_of_a_base_is_shown_there(tmp_path: Path) -> None:
    path = write(tmp_path, low="run: {}\ntrain: {steps\n", top="base: low.yaml\n")
    assert "\nlow.yaml:3: not valid YAML" in message(path)


def test_another_kind_of_source_replaces_the_section(tmp_path: Path) -> None:
    low = GOOD + "data: {row_length: 64, source: {kind: huggingface, name: some/text, split: test}}\n"
    path = write(tmp_path, low=low, top="base: low.yaml\ndata: {source: {kind: text, paths: [a]}}\n")
    assert Config.from_yaml(path).data.source == TextSource(kind="text", paths=["a"])
    assert Config.from_yaml(path).data.row_length == 64
    overridden = Config.from_yaml(tmp_path / "low.yaml", ["data.source.kind=text", "data.source.paths=[b]"])
    assert overridden.data.source == TextSource(kind="text", paths=["b"])
    same_kind = Config.from_yaml(tmp_path / "low.yaml", ["data.source.name=other/text"])
    assert same_kind.data.source == HuggingFaceSource(kind="huggingface", name="other/text", split="test")


def test_overrides_win_create_keys_and_the_last_wins(tmp_path: Path) -> None:
    config = load(tmp_path, "", "train.steps=900", "logging.wandb=true", "train.betas=[0.5, 0]", "train.steps=1000",
                  "data.tokenizer.path=a=b.json", "data.tokenizer={train_bytes: 5}")  # fmt: skip
    assert (config.train.steps, config.logging.wandb, config.train.betas) == (1000, True, (0.5, 0.0))
    assert (config.data.tokenizer.path, config.data.tokenizer.train_bytes) == ("a=b.json", 5)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.step=3", "train.step: unknown key\n    allowed: in train: steps,"),
        ("train.steps=many", 'train.steps: found "many" (a string)\n    allowed: an integer of at least 1'),
        ("train.steps", "not an override\n    allowed: key.path=value, such as train.steps=1000"),
        ("=3", "not an override"),
        ("train..steps=3", "not an override"),
        ("--train.steps=3", "not an override"),
        ("run.seed=", "run.seed: found null (nothing)"),
        ("run.name={", "run.name: not valid YAML"),
        ("run.name=!!python/name:os.system", "run.name: the tag"),
        ("train.steps.more=3", "train.steps: found a section"),
        ("base=other.yaml", "base: only allowed in a file"),
        ("run={sed: 3}", "run.sed: unknown key"),
    ],
)
def test_an_override_is_blamed_by_its_text(override: str, expected: str, tmp_path: Path) -> None:
    said = message(write(tmp_path, run=GOOD), override)
    assert f"\ncommand line ('{override}'): {expected}" in said


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("3e-4", 3e-4),
        ("1E-3", 1e-3),
        ("1e5", 1e5),
        (".5", 0.5),
        ("2.", 2.0),
        ("+1.5e+2", 150.0),
        ("1", 1.0),
        ("0x10", 16),
    ],
)
def test_numbers(written: str, value: float, tmp_path: Path) -> None:
    assert load(tmp_path, "", f"train.learning_rate={written}").train.learning_rate == value


@pytest.mark.parametrize(("written", "value"), [("1_000_000", 1_000_000), ("010", 10), ("0x1f", 31), ("+5", 5)])
def test_integers(written: str, value: int, tmp_path: Path) -> None:
    assert load(tmp_path, "", f"run.seed={written}").run.seed == value


@pytest.mark.parametrize(
    "text", ["yes", "on", "Off", "n", "2024-01-31", "12:30:45", "1.2.3", "0o17", "1__0", "e5", "=", "<<"]
)
def test_what_reads_as_a_string(text: str, tmp_path: Path) -> None:
    assert load(tmp_path, "", f"run.name={text}").run.name == text


def test_core_or_reasoning_by_the_section(tmp_path: Path) -> None:
    assert load(tmp_path).kind == "core"
    low = "model: {size: 1b}\ntrain: {steps: 5, batch_rows: 1, micro_batch_rows: 1, learning_rate: 1}\nreasoning: {}\n"
    path = write(tmp_path, low=low, top="base: low.yaml\nreasoning: null\n")
    assert Config.from_yaml(tmp_path / "low.yaml").kind == "reasoning"
    assert Config.from_yaml(path).kind == "core"


def test_paths_are_left_as_written(tmp_path: Path) -> None:
    config = load(tmp_path, "data: {source: {kind: jsonl, paths: [a/*.jsonl, ~/b]}, tokenizer: {path: t.json}}\n")
    assert config.model_dump()["data"]["source"]["paths"] == ["a/*.jsonl", "~/b"]
    assert config.data.tokenizer.path == "t.json"


def test_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert Config.from_yaml(path).train.steps == 500


def test_aliases_within_a_file(tmp_path: Path) -> None:
    config = load(tmp_path, "run: {name: &n shared}\ndata: {cache: *n}\n")
    assert (config.run.name, config.data.cache) == ("shared", "shared")


@pytest.mark.parametrize("base", ["", "data: {source: {kind: csv, paths: [z.csv], text_field: body}}\n"])
@pytest.mark.parametrize(
    "overrides",
    [
        ["data.source.paths=[a.jsonl]", "data.source.kind=jsonl"],
        ["data.source.kind=jsonl", "data.source.paths=[a.jsonl]"],
        ["data.source.kind=text", "data.source.paths=[a.jsonl]", "data.source.kind=jsonl"],
        ["data.source={kind: csv, paths: [b], text_field: c}", "data.source={kind: jsonl, paths: [a.jsonl]}"],
        ["data.source={kind: jsonl, paths: [b]}", "data.source.paths=[a.jsonl]"],
    ],
)
def test_the_order_of_a_kind_and_its_keys_makes_no_difference(tmp_path: Path, base: str, overrides: list[str]) -> None:
    assert load(tmp_path, base, *overrides).data.source == JsonlSource(kind="jsonl", paths=["a.jsonl"])


DOMAINS = """\
data:
  domains:
    web: {source: {kind: csv, paths: [z.csv], text_field: body}, max_epochs: 2}
    books: {source: {kind: text, paths: [b]}}
"""


def test_domains_are_inherited_and_overridden_one_by_one(tmp_path: Path) -> None:
    heir = "base: low.yaml\ndata: {domains: {code: {source: {kind: stdlib}}, web: {max_epochs: 3}}}\n"
    path = write(tmp_path, low=GOOD + DOMAINS, top=heir)
    config = Config.from_yaml(path, ["data.domains.books.source.paths=[c]", "data.domains.books.priority=4"])
    domains = config.data.domains
    assert domains is not None
    assert list(domains) == ["web", "books", "code"]
    assert domains["web"].max_epochs == 3
    assert domains["books"].source == TextSource(kind="text", paths=["c"])
    assert domains["books"].priority == 4
    assert Config.from_yaml(write(tmp_path, dump=config.to_yaml())) == config


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.domains.web.source.kind=jsonl", "data.domains.web.source.paths=[a.jsonl]"],
        ["data.domains.web.source.paths=[a.jsonl]", "data.domains.web.source.kind=jsonl"],
        ["data.domains.web.source={kind: jsonl, paths: [a.jsonl]}"],
    ],
)
def test_another_kind_of_source_takes_nothing_of_the_old_one(tmp_path: Path, overrides: list[str]) -> None:
    domains = load(tmp_path, DOMAINS, *overrides).data.domains
    assert domains is not None
    assert domains["web"].source == JsonlSource(kind="jsonl", paths=["a.jsonl"])
    assert domains["web"].max_epochs == 2


def test_bounds_are_merged_by_name(tmp_path: Path) -> None:
    text = "data: {filters: {bounds: {mean_length: 3, other.rule: 0.5}}}\n"
    bounds = load(tmp_path, text, "data.filters.bounds.mean_length=4").data.filters.bounds
    assert bounds == {"mean_length": 4, "other.rule": 0.5}


def test_the_dump_stands_by_itself(tmp_path: Path) -> None:
    path = write(tmp_path, low=GOOD, top="base: low.yaml\nmodel: {attention: {kv_heads: 2}}\n")
    config = Config.from_yaml(path, ["run.name=3e-4x", "train.ema_decay=0.999"])
    (tmp_path / "low.yaml").unlink()
    text = config.to_yaml()
    assert text.startswith("# One core run of cdrmix")
    assert Config.from_yaml(write(tmp_path, snapshot=text)) == config
    # any YAML 1.1 reader gets the same values
    assert yaml.safe_load(text)["train"]["learning_rate"] == config.train.learning_rate
    assert "base" not in yaml.safe_load(text)
    assert set(yaml.safe_load(text)) == {"run", "model", "data", "train", "logging", "export", "evaluation"}


def test_the_hash_is_of_values_not_of_how_they_were_written(tmp_path: Path) -> None:
    plain = load(tmp_path)
    assert len(plain.hash()) == 64
    assert load(tmp_path, "run: {seed: 1}\n").hash() == plain.hash()
    assert load(tmp_path, "", "train.learning_rate=0.003").hash() == plain.hash()
    assert load(tmp_path, "", "run.root=elsewhere").hash() == plain.hash()
    assert Config.from_yaml(write(tmp_path, dump=plain.to_yaml())).hash() == plain.hash()


@pytest.mark.parametrize(
    "change",
    [
        "run.root=r",
        "run.name=b",
        "run.threads=3",
        "data.cache=d",
        "data.workers=7",
        "data.memory_mb=512",
        "data.engine=ray",
        "train.keep_last=1",
        "train.log_every=11",
        "logging.wandb=true",
    ],
)
def test_what_decides_no_weight_is_not_hashed(tmp_path: Path, change: str) -> None:
    assert load(tmp_path, "", change) != load(tmp_path)
    assert load(tmp_path, "", change).hash() == load(tmp_path).hash()


@pytest.mark.parametrize(
    "change",
    ["run.seed=2", "run.device=cpu", "data.row_length=8", "train.steps=9", "train.learning_rate=0.1"],
)
def test_what_decides_a_weight_is_hashed(tmp_path: Path, change: str) -> None:
    assert load(tmp_path, "", change).hash() != load(tmp_path).hash()


def test_the_default_source_is_the_standard_library(tmp_path: Path) -> None:
    (domain,) = load(tmp_path).data.all_domains().values()
    assert domain.source == StdlibSource(kind="stdlib")
