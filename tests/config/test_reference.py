"""The configuration reference: complete, equal to the committed page, and printed by `cdrmix config`."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import main

from cdrmix.config.reference import reference
from cdrmix.config.schema import Config

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_committed_page_is_what_the_schema_gives() -> None:
    # After a change of the schema: cdrmix config > docs/configuration.md
    assert PAGE.read_text(encoding="utf-8") == reference()


def test_every_key_is_there_and_has_a_meaning() -> None:
    schema = Config.model_json_schema()
    page = reference()
    for name, section in schema["$defs"].items():
        for key, value in section["properties"].items():
            if "description" not in value and "$ref" in value:  # a section, described by its class
                value = schema["$defs"][value["$ref"].rpartition("/")[2]]
            assert value.get("description", "").rstrip().endswith("."), f"{name}.{key} has no docstring below it"
            assert f".{key}`: " in page, f"{name}.{key}"


def test_a_key_is_printed_with_type_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "train.warmup_steps"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        said
        == "- `train.warmup_steps`: an integer of at least 0, default `0`. Steps of linear warmup. Must be below steps."
    )
    assert main(["config", "train.steps"]) == 0
    assert "*required*" in capsys.readouterr().out
    assert main(["config", "model.attention.kv_heads"]) == 0
    assert "derived from `model.attention.heads`" in capsys.readouterr().out
    assert main(["config", "data.source.text_field"]) == 0  # a key of several kinds of source
    assert capsys.readouterr().out.count("- `data.source.text_field`") == 4


def test_a_section_is_printed_with_the_sections_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "data.objectives"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("## `data.objectives`\n")
    assert "`data.objectives.spans[].weight`" in out
    assert "data.dedup" not in out
    assert main(["config", "reasoning.agent"]) == 0  # written out, though of the type of another section
    assert "`reasoning.agent.chunks`" in capsys.readouterr().out


def test_an_unknown_key_gets_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "train.stesp"]) == 2
    assert "has no key train.stesp; did you mean train.steps?" in capsys.readouterr().err
