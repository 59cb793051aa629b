"""The documentation against the program: commands, keys, exit codes, examples and links."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lm_eval._cli import HarnessCLI

from cdrmix import cli, errors
from cdrmix.config import schema_types
from cdrmix.config.reference import reference
from cdrmix.config.schema import Config
from cdrmix.config.schema_ladder import Ladder, LadderFile
from cdrmix.errors import ConfigError
from cdrmix.hf import lm_eval

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [page.stem for page in PAGES]
LADDER_COMMANDS = ("ladder run", "ladder status")  # their --config is a ladder file
SECTIONS = "|".join(schema_types.keys(schema_types.root(Config)))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def code(page: Path) -> list[str]:
    """What stands between single backticks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`]+)`", text)


def commands() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for line in "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines():
            arguments = shlex.split(line, comments=True)
            if arguments:
                yield page.name, arguments


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize(("page", "arguments"), list(commands()), ids=str)
def test_a_command_is_one_that_the_program_takes(page: str, arguments: list[str]) -> None:
    program = arguments[0].removeprefix(".venv/bin/")
    if program == "deepspeed":  # whose own options test_nodes.py uses
        program, arguments = "cdrmix", arguments[arguments.index("cdrmix.cli") :]
    if program == "make":
        assert re.search(rf"^{arguments[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), page
    elif program in ("cdrmix", "cdrmix-train"):
        options, overrides = cli.parser().parse_known_args(
            cli.joined([*(["train"] if program != "cdrmix" else []), *arguments[1:]])
        )
        assert all("=" in word for word in overrides), page
        config = getattr(options, "config", None)
        if config is not None:
            path = ROOT / config
            if not path.is_file():
                assert str(config) == "my.yaml", f"{page}: {config}"  # stands for a file of the reader
                path = ROOT / "configs" / "cdrmix-core-tiny.yaml"
            (LadderFile if options.name in LADDER_COMMANDS else Config).from_yaml(path, overrides)
    elif program == "python" and arguments[1] == "-m":
        assert arguments[2] == "cdrmix.hf.lm_eval", f"{page}: {arguments}"
        HarnessCLI()._parser.parse_args(["run", *arguments[3:]])
        words = arguments[arguments.index("--model_args") + 1].split(",")
        assert {word.partition("=")[0] for word in words} <= {*lm_eval.ARGUMENTS}, page
    elif program == "python":
        source = (ROOT / arguments[1]).read_text()
        assert all(f'add_argument("{it}"' in source for it in arguments if it.startswith("--")), page
    else:
        assert program in ("pip", "pytest"), f"{page}: {arguments}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_command_in_a_sentence_exists(page: Path) -> None:
    for text in code(page):
        program, *arguments = text.removeprefix(".venv/bin/").split() or [""]
        if program == "cdrmix" and arguments and arguments[0] != "COMMAND":
            known = cli.parser().format_help()
            assert re.search(rf"^    {arguments[0]}( |$)", known, re.MULTILINE), text
        if program == "make" and arguments and "=" not in arguments[0]:
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), text


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_key_in_a_sentence_exists(page: Path) -> None:
    found = (re.match(rf"((?:{SECTIONS})(?:\.[a-z_0-9<>]+)+)(?![\w/(])", text) for text in code(page))
    for key in sorted({match[1] for match in found if match}):
        try:
            reference(key)
        except ConfigError as error:
            pytest.fail(f"{page.name}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_yaml_example_is_a_configuration(page: Path, tmp_path: Path) -> None:
    for example in blocks(page, "yaml"):
        path = tmp_path / "example.yaml"
        path.write_text(example.replace("base: configs/", f"base: {ROOT}/configs/"))
        (LadderFile if example.startswith("ladder:") else Config).from_yaml(path)


def test_the_page_of_the_ladder_has_every_key_of_a_ladder_file() -> None:
    page = (ROOT / "docs" / "ladder.md").read_text().partition("### The ladder file")[2].partition("###")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page, re.MULTILINE))
    assert [*rows] == [*Ladder.model_fields]
    for name, field in Ladder.model_fields.items():
        if rows[name].startswith("`"):
            default = field.default if isinstance(field.default, str) else json.dumps(field.default)
            assert rows[name].strip() == f"`{default}`", name
        else:
            assert rows[name].strip() == ("*required*" if field.is_required() else "a section"), name


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(path), f"{page.name}: {target}"


def test_the_page_of_exit_codes_is_complete() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \|([^|]*)\|", (ROOT / "docs" / "exit-codes.md").read_text(), re.MULTILINE)
    told = {
        (int(number), name.strip()) for code, names in rows for number in code.split(",") for name in names.split(",")
    }
    classes = [it for it in vars(errors).values() if isinstance(it, type) and issubclass(it, errors.CdrmixError)]
    assert {(it.exit_code, f"`{it.__name__}`") for it in classes} == {it for it in told if it[1]}
    others = {number for number, name in told if not name}
    assert others == {0, 138, 143, cli.INTERRUPTED, cli.BROKEN_PIPE, cli.UNEXPECTED}


def test_the_example_of_the_operators_runs() -> None:
    (example,) = blocks(ROOT / "docs" / "operators.md", "python")
    names: dict[str, object] = {}
    exec(example, names)
    assert names["loss"].isfinite()  # type: ignore[attr-defined]


def test_the_examples_of_the_data_page_run() -> None:
    names: dict[str, Any] = {}
    for example in blocks(ROOT / "docs" / "data.md", "python"):
        exec(example, names)
    assert sorted(document.text for document in names["survivors"]) == ["a text", "another"]
    assert names["signatures"].shape == (2, 128)
    assert (names["points"], names["share"]) == (1.0, 1.0)


def test_the_names_of_the_reference_exist() -> None:
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert names
    for name in names:
        *modules, found = name.split(".")
        owner = modules.pop() if modules[-1].istitle() else None  # the class of a method
        module = importlib.import_module(".".join(modules))
        assert hasattr(getattr(module, owner) if owner else module, found), name


def test_the_page_of_operators_lists_them_all() -> None:
    from cdrmix.ops import OPS

    rows = re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs" / "operators.md").read_text(), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(OPS)
