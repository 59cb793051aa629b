"""docs/specification.md says what the released configurations hold: every setting in its tables is compared."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from counted import parameters_of

from cdrmix.config.schema import Config
from cdrmix.config.schema_data import CurriculumStage, TasksSource
from cdrmix.reason.heads import OPERATIONS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "specification.md"
SIZES = ("1b", "4b", "40b", "200b")
CLASSES = {
    "web": ("web", "wiki", "forum", "wikiteam", "docs"),
    "books": ("books", "open_books", "library"),
    "code": ("code",),
    "academic": ("papers", "math", "medicine"),
}
WEB_LIKE = CLASSES["web"]
REASONING = ("papers", "math", "medicine", "recall", "steps")
SETTING = re.compile(r"`(?:(core|reason):)?([a-z][a-z0-9_.]*)=([^`]+)`")


@cache
def config_of(kind: str, size: str) -> Config:
    return Config.from_yaml(ROOT / "configs" / f"cdrmix-{kind}-{size}.yaml")


@cache
def values_of(kind: str, size: str) -> Any:
    return yaml.safe_load(config_of(kind, size).to_yaml())


def tables() -> dict[str, list[tuple[str, str]]]:
    """By section: the first cell of every row, and the cell of what is shipped."""
    found: dict[str, list[tuple[str, str]]] = {}
    section = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("|") and not line.startswith(("|---", "| | ")):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 4, line
            assert cells[3], f"no reason is given: {line}"
            found.setdefault(section, []).append((cells[0], cells[2]))
    return found


SETTINGS = [
    pytest.param(section, *match, id=":".join(part for part in (match[0], match[1]) if part))
    for section, rows in tables().items()
    for _, cell in rows
    for match in SETTING.findall(cell)
]


def active(size: str) -> int:
    return parameters_of(config_of("core", size).model).total_active


def tokens(config: Config) -> int:
    return config.train.steps * config.train.batch_rows * config.data.row_length


def shares(stages: list[CurriculumStage]) -> dict[str, float]:
    """The share of every domain over all stages."""
    found: dict[str, float] = {}
    for start, stage in zip([0.0, *(stage.until for stage in stages)], stages, strict=False):
        assert stage.domains is not None
        total = sum(stage.domains.values())
        for name, weight in stage.domains.items():
            found[name] = found.get(name, 0.0) + (stage.until - start) * weight / total
    return found


def percent(weights: dict[str, float], names: tuple[str, ...]) -> float:
    return 100 * sum(weights.get(name, 0.0) for name in names)


def published_tokens() -> dict[str, float]:
    """Tokens of every domain, as the comments of the configurations give them: "(13.9e9)"."""
    text = "".join((ROOT / "configs" / "base" / f"{name}.yaml").read_text() for name in CORPORA)
    rows = re.findall(r"^    (\w+):  # .*?(\d+(?:\.\d+)?e9)[,)]", text, re.MULTILINE)
    return {name: float(count) for name, count in rows}


CORPORA = ("standard-curriculum", "extended-corpora")


def epochs(config: Config, mixture: str, names: tuple[str, ...]) -> float:
    there = published_tokens()
    wanted = percent(shares(config.data.mixtures[mixture]), names) / 100 * tokens(config)
    return wanted / sum(there[name] for name in names if name in config.data.all_domains())


def computed(name: str, kind: str, size: str) -> Any:
    """What the names without a dot stand for."""
    config = config_of(kind, size)
    _, stages = config.data.stages()
    domains = config.data.all_domains()
    web_like = [domains[part].filters for part in WEB_LIKE if part in domains]
    if name == "active_parameters":
        return active(size)
    if name == "tokens":
        return tokens(config)
    if name == "tokens_per_step":
        return config.train.batch_rows * config.data.row_length
    if name == "domain_count":
        return len(domains)
    if name == "web_like_rules":
        (common,) = {tuple(section.rules) for section in web_like[1:] if section}
        return list(common)
    if name == "web_like_least_characters":
        (bound,) = {section.bounds["length"] for section in web_like if section}
        return bound
    if name == "quality_rules":
        assert web_like[0] is not None
        return web_like[0].rules[2:]
    if name == "standard_shares":
        found = shares(config.data.mixtures["standard"])
        return [round(percent(found, parts), 6) for parts in CLASSES.values()]
    if name in ("standard_book_epochs", "balanced_book_epochs"):
        return epochs(config, name.split("_")[0], CLASSES["books"])
    if name == "reasoning_percent":
        last = stages[0].domains  # of the first stage, nine tenths of the training
        assert last is not None
        return percent({part: weight / sum(last.values()) for part, weight in last.items()}, REASONING)
    if name == "long_percent":
        lengths = stages[-1].lengths
        return "none" if lengths is None else 100 * lengths[-1] / sum(lengths)
    if name == "curriculum_stages":
        return len(stages)
    if name == "operations":
        return list(OPERATIONS)
    assert name == "stage_b_steps", name
    assert config.reasoning is not None
    return sum(phase.steps for _, phase in config.reasoning.phases)


def agrees(written: str, found: Any) -> bool:
    """Whether a value is what is written of it; computed fractions to as many digits as there are written."""
    if isinstance(found, list):
        return written.split(",") == [str(part) if not isinstance(part, float) else f"{part:g}" for part in found] or (
            [float(part) for part in written.split(",")] == found if isinstance(found[0], float) else False
        )
    if isinstance(found, bool) or found is None or isinstance(found, str):
        return bool(yaml.safe_load(written) == found)
    digits = len(re.sub(r"e\d+$", "", written).replace(".", "").lstrip("0"))
    return float(written) == found or float(written) == float(f"{found:.{digits}g}")


@pytest.mark.parametrize(("section", "kind", "key", "written"), SETTINGS)
def test_what_the_page_says_is_shipped(section: str, kind: str, key: str, written: str) -> None:
    kinds = [kind] if kind else ["reason"] if section == "Stage B" else ["core", "reason"]
    values = written.split("/") if "/" in written else [written] * 4
    assert len(values) == len(SIZES)
    for kind in kinds:
        for size, value in zip(SIZES, values, strict=True):
            found: Any = values_of(kind, size)
            if "." in key:
                for part in key.split("."):
                    found = found[part]
            else:
                found = computed(key, kind, size)
            assert agrees(value, found), f"{kind}-{size}: {key} is {found}, the page says {value}"


def test_the_page_has_three_tables_and_no_row_without_a_setting_but_those_of_what_is_not_shipped() -> None:
    found = tables()
    assert list(found) == ["Released configurations", "Data", "Stage B"]
    without = {row for rows in found.values() for row, cell in rows if not SETTING.search(cell)}
    assert without == {"profanity, toxicity", "tool use, API documentation", "sampling temperature"}
    cells = [cell for rows in found.values() for _, cell in rows]
    assert all(not SETTING.sub("", cell).strip() for cell in cells), "what is shipped is settings alone"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["core", "reason"])
def test_steps_and_the_average_follow_from_the_counter(kind: str, size: str) -> None:
    train, config = config_of(kind, size).train, config_of(kind, size)
    wanted = 20 * active(size) / (train.batch_rows * config.data.row_length)
    assert train.steps == pytest.approx(wanted, abs=51), "rounded to hundreds"
    assert train.ema_decay is not None
    assert 1 / (1 - train.ema_decay) == pytest.approx(0.05 * train.steps, rel=0.1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mixture", ["balanced", "standard"])
def test_a_reasoning_variant_has_a_quarter_more_reasoning_text(size: str, mixture: str) -> None:
    """A quarter of tasks and three quarters of the core's text; at 200b balanced, a quarter more than the core."""
    mixtures = [config_of(kind, size).data.mixtures[mixture] for kind in ("core", "reason")]
    core, reason = (shares(stages) for stages in mixtures)
    assert set(reason) - set(core) <= {"math", "recall", "steps"}
    if (size, mixture) == ("200b", "balanced"):
        assert percent(reason, REASONING) >= 1.25 * percent(core, REASONING)
        return
    assert percent(reason, REASONING) == pytest.approx(0.75 * percent(core, REASONING) + 25, abs=0.05)
    for name in set(core) - set(REASONING):
        assert reason[name] == pytest.approx(0.75 * core[name], abs=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_every_web_like_set_is_filtered_by_language_and_length(size: str) -> None:
    for kind in ("core", "reason"):
        domains = config_of(kind, size).data.all_domains()
        for name in WEB_LIKE:
            if name in domains:
                filters = domains[name].filters
                assert filters is not None
                assert filters.rules[:2] == ["language", "length"]
                assert {"gopher_max_words", "gopher_quality"} & set(filters.rules)
        for domain in domains.values():
            assert isinstance(domain.source, TasksSource) or domain.url_field == "metadata.url"


def test_sizes_grow() -> None:
    """The page's columns are in order, so that four values are those of the four sizes."""
    counts = [active(size) for size in SIZES]
    assert all(low < high for low, high in pairwise(counts))
