"""The tables of docs/stage-b.md and stage-b-results.md are those of the kept results; what is added to them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="needs pydantic, which is not installed")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
ablations: Any = importlib.import_module("ablations")
sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ablations.RESULTS.read_text().splitlines()]


def test_every_table_is_that_of_the_kept_results(rows: list[dict[str, Any]]) -> None:
    """After a change of either, `python benchmarks/ablations.py` writes them again."""
    measured = ablations.collect(rows)
    text = ablations.PAGE.read_text()
    assert ablations.page(text, measured) == text
    assert ablations.ALL_RESULTS.read_text() == ablations.all_results(rows, measured)


def test_the_page_has_the_verdicts_and_a_table_of_every_file() -> None:
    text = ablations.PAGE.read_text()
    assert [name for name in ("verdicts", *ablations.SHOWN) if f"<!-- {name} -->" not in text] == []
    files = {path.stem for path in ablations.CONFIGS.glob("*.yaml")}
    assert files == set(ablations.SHOWN)


def test_the_page_counts_its_verdicts(rows: list[dict[str, Any]]) -> None:
    lines, sentence = ablations.verdicts(ablations.collect(rows))
    holding = sum(line.rstrip(" |").endswith("| holds") for line in lines)
    assert sentence.startswith(f"Of {len(lines) - 2} demands, {holding} hold, ")
    assert sentence in ablations.PAGE.read_text()


def test_a_mean_of_the_page_by_hand(rows: list[dict[str, Any]]) -> None:
    values = [row["measured"]["harder@64"] for row in rows if row["case"] == "delta-recall, on"]
    mean = f"{sum(values) / len(values):.3f}"
    (line,) = [line for line in ablations.PAGE.read_text().splitlines() if "| on, harder@64 " in line]
    assert line.split("|")[3].split()[0] == mean


def test_rows_of_no_arm_and_rows_that_are_there_twice_are_refused(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="'hebb, dleta' is no arm"):
        ablations.collect([{**rows[0], "case": "hebb, dleta"}])
    with pytest.raises(ValueError, match="occurs twice"):
        ablations.collect([rows[0], rows[0]])
    with pytest.raises(ValueError, match="no table is called 'heb'"):
        ablations.page("<!-- heb -->\n<!-- end -->", ablations.collect(rows))


def test_arms_that_are_the_same_experiment_share_rows(rows: list[dict[str, Any]]) -> None:
    measured = ablations.collect(row for row in rows if row["case"] == "delta-recall, on")
    assert measured["hebb"]["delta"] == measured["delta-recall"]["on"]
    assert measured["hebb"]["delta"]
    assert measured["hebb"]["hebb"] == {}


def test_results_are_added_once(rows: list[dict[str, Any]]) -> None:
    where = {"torch": "2.13.0", "device": "NVIDIA H200", "threads": 1}
    line = {"mark": "x", "what": "hebb, delta", **where, "seed": 99, "seconds": 1.0, "measured": {"accuracy@4": 1.0}}
    (row,) = ablations.added([json.dumps(line)], rows, "abc1234")
    assert row["case"] == "hebb, delta"
    assert row["commit"] == "abc1234"
    assert row["device"] == "NVIDIA H200"
    assert row.keys() == rows[0].keys()
    assert ablations.added([json.dumps(line)], [*rows, row], "abc1234") == []
    with pytest.raises(ValueError, match="line 1: 'hebb, delta', seed 99 is there from NVIDIA H200, this is of cpu"):
        ablations.added([json.dumps(line | {"device": "cpu"})], [*rows, row], "abc1234")
    del line["torch"]
    with pytest.raises(ValueError, match="line 1 has no torch; run it again"):
        ablations.added([json.dumps(line)], rows, "abc1234")


def test_rows_of_seeds_that_the_file_does_not_name_are_in_no_table() -> None:
    rows = [
        {"case": "hebb, hebb", "seed": seed, "measured": {"accuracy@4": float(seed)}, "device": "cpu", "commit": "x"}
        for seed in (3, 4)
    ]
    assert ablations.collect(rows)["hebb"]["hebb"] == {4: {"accuracy@4": 4.0}}
