"""Every scanner, filter and regular expression takes time in proportion to its text, whatever that is.

Steps are counted where that is possible: those of the C++ scanner of personal data, and the calls of Python functions.
The C++ of filters and near-duplicates and Python's regular expressions do not count theirs. There the CPU time is
bounded, the least of several runs, so far above linear time and below quadratic time that the machine does not matter.
"""

from __future__ import annotations

import ast
import importlib
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]  # the parsed form of an expression, to make texts of it
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import pytest

import cdrmix
from cdrmix import _dedup, _text
from cdrmix.config.schema_objectives import Cot, Objectives, Span
from cdrmix.data.cleaning import language, normalize, pii, urls
from cdrmix.data.objectives import marked_spans
from cdrmix.data.tasks.rng import sentences_of
from cdrmix.eval.choices import _plain
from cdrmix.eval.programs import function_heads

KEY = "q8Zk2LxP0vR7tYb3WnD5mHc9JfGs1AeU4iOoX6Tz"
# What shapes begin with, and what hides the next one.
UNITS = [
    *("\u0316\u0301", "\u0f73"),  # marks that are not in their order
    *("a", "1", " ", "\n", "-", ".", "@", "(", "=", "é", "中", "Σ'", "\u0301", "{", "<", "<b>", "&#0;", "sk-"),
    *("xoxb-", "glpat-", "pypi-", "ya29.", "eyJ", "eyJ-", "eyJaaaaaaaaaaa.", "eyJaaaaaaaaaaa-eyJaaaaaaaaaaa."),
    *("SG.aaaaaaaaaaaaaaaa-SG.", "AIza", "npm_", "=a", "=aaaaaaaaaaaaaaaaaaa1", "token=1a"),
    *("A1", "AA11", "2001:", "1-", "1 ", "+1", "(4", "a@", "@a."),
    *("é@é.", "o'", "'a@b.cc", "请a@b.cc", "a@b.cc@", "a@b.cc ", "+4155552671", "93.184.216.34/", "tel 5551234 "),
    *(f"npm_{KEY[:36]}", f"AIza{KEY[:35]}", f"sk-{KEY}-", "-----BEGIN "),
    *("-----BEGIN A ", "-----BEGIN PRIVATE KEY-----"),
    *("http://", "www.", "%2e/", "../", "&utm_a=", ";jsessionid=", "?", "#!", "ü.", "[", "def f(", ")->", "def f():\n"),
    *("<t>", "</t>", "<t></t>", ". ", "lorem ipsum ", "privacy policy"),
]  # fmt: skip
every_unit = pytest.mark.parametrize("unit", UNITS, ids=ascii)


def pumped(unit: str, size: int) -> str:
    return unit * (size // len(unit))


@every_unit
def test_the_scanner_of_personal_data(unit: str) -> None:
    """Below and above the bound of 4,096 bytes of a key, to which a search from each word would be quadratic."""
    for size in (1000, 2000, 4000):
        assert _text.personal_steps(pumped(unit, 2 * size)) <= 2.5 * _text.personal_steps(pumped(unit, size)) + 200
    assert _text.personal_steps(pumped(unit, 4000)) <= 4000 * 250  # bounded from each word: the longest number is read


def calls(function: Callable[[str], object], text: str) -> int:
    """How many functions are called, of Python and of C."""
    count = 0

    def add(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(add)
    try:
        function(text)
    finally:
        sys.setprofile(before)
    return count


SPANS = Objectives(cot=Cot(begin="<t>", end="</t>"), spans=[Span(begin="<b>", end="</b>", weight=0.5)])
SCANNERS: dict[str, Callable[[str], object]] = {
    "scrub": lambda text: pii.scrub(text, pii.PLACEHOLDERS),
    "normalize": normalize.normalize,
    "html_text": normalize.html_text,
    "canonical_url": lambda text: (urls.split.cache_clear(), urls.canonical_url(f"http://a.example/{text}")),
    "host": lambda text: (urls.split.cache_clear(), urls.canonical_url(f"http://{text}")),
    "marked_spans": lambda text: marked_spans(text, SPANS),
    "sentences_of": lambda text: [*sentences_of(text)],
    "function_heads": lambda text: [*function_heads([text])],
    "choices": _plain,
}
COMPILED: dict[str, Callable[[str], object]] = {
    "statistics": lambda text: _text.statistics([text]),
    "squeezed": _text.squeezed,
    "language": lambda text: language.detect([text]),
    "simhash": lambda text: _dedup.simhash(_dedup.Texts([text]), 1),
    "minhash": lambda text: _dedup.minhash(_dedup.Texts([text]), 8, 5, 1, 1),
}


@pytest.mark.parametrize("name", SCANNERS)
def test_calls_of_scanners_in_python(name: str) -> None:
    for unit in UNITS:
        few, many = (calls(SCANNERS[name], pumped(unit, size)) for size in (1500, 3000))
        assert many <= 2.5 * few + 100, ascii(unit)


def cpu_time(work: Callable[[Any], object], text: Any, most: float) -> float:
    """The least of up to three runs, so that an interrupted one does not count. Only one if it takes less than most."""
    least = float("inf")
    for _ in range(3):
        started = time.process_time()
        work(text)
        least = min(least, time.process_time() - started)
        if least < most:
            break
    return least


@pytest.mark.parametrize("name", [*SCANNERS, *COMPILED])
def test_time_of_scanners(name: str) -> None:
    """20 kB take some 2 ms, and replacing all of it 30 ms; at a nanosecond a step, quadratic time is 0.4 s."""
    scan = {**SCANNERS, **COMPILED}[name]
    for unit in UNITS:
        text = pumped(unit, 20_000)
        assert cpu_time(scan, text, 0.2) < 0.2, ascii(unit)


def test_sentences_of_a_text_without_spaces() -> None:
    """Copying the rest of it for each of its 10,000 sentences takes 10 s."""
    text = "a" * 4_000_000
    assert cpu_time(SCANNERS["sentences_of"], text, 0.5) < 0.5


# ---- regular expressions ----

SEARCHES = {"search", "sub", "subn", "split", "findall", "finditer"}  # they try each place of a text
FUNCTIONS = {"compile", "match", "fullmatch", *SEARCHES}
# Expressions that functions make from what they are given, by module: one of each. None: the user's own.
MADE: dict[str, list[str | bytes | None]] = {
    "cdrmix.inference.checkpoints": [r"model(-[a-z0-9-]+)?\.safetensors"],
    "cdrmix.reason.documents": [b"(?=a fact)"],
    "cdrmix.hf.tool_prompts": [r"(<\|im_start\|>|<\|im_end\|>)"],
    "cdrmix.data.chat.rendering": [
        "<s>|</s>",
        "\ue000(?P<text><s>|</s>)\ue001|(?P<special><s>)|(?P<border>\ue002)|[\ue000\ue001]",
    ],
    "cdrmix.data.cleaning.normalize": ["[\u0301\u0316]", "[\u0301\u0316]{64,}"],
    "cdrmix.data.sources.conversations": [r"\n\n(Human|Assistant):"],
    "cdrmix.data.tasks.rng": [r"\b(one|other)\b"],
    "cdrmix.eval.leak": [None],
}  # fmt: skip


class Expression(NamedTuple):
    """An expression of the package. used: the functions by which it is used."""

    place: str
    pattern: re.Pattern[Any]
    used: set[str]

    def run(self, text: Any) -> None:
        """Searches the text as the package does."""
        if self.used & SEARCHES:
            for _ in self.pattern.finditer(text):
                pass
        if "match" in self.used:
            self.pattern.match(text)
        if "fullmatch" in self.used:
            self.pattern.fullmatch(text)


@cache
def sources() -> dict[str, str]:
    """The source of each module of the package by its name."""
    root = Path(cdrmix.__file__).parent
    paths = sorted(path for path in root.rglob("*.py") if path.relative_to(root).parts[0] != "kernels")
    names = [".".join(("cdrmix", *path.relative_to(root).with_suffix("").parts)) for path in paths]
    return {name.removesuffix(".__init__"): path.read_text() for name, path in zip(names, paths, strict=True)}


def expressions() -> Iterator[Expression]:
    """Every expression that a call of a function of `re` in the package names."""
    uses: dict[str, set[str]] = {}
    for source in sources().values():
        for named, function in re.findall(r"\b([A-Za-z_]+)\.([a-z]+)\(", source):
            uses.setdefault(named, set()).add(function)
    for name, source in sources().items():
        if "re." not in source or "import re\n" not in source:
            continue
        names, made, tree = vars(importlib.import_module(name)), iter(MADE.get(name, [])), ast.parse(source)
        assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign)]
        assigned = {
            node.value: ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            for node in assignments
        }
        for node in ast.walk(tree):
            is_call = (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FUNCTIONS
            )
            if not is_call or ast.unparse(node.func.value) != "re":
                continue
            place, written = f"{name}:{node.lineno}", ast.unparse(node.args[0])
            flags = [each for each in ast.walk(node) if isinstance(each, ast.Attribute) and each.attr.isupper()]
            value = sum(int(eval(ast.unparse(flag), names)) for flag in flags if ast.unparse(flag.value) == "re")
            try:
                pattern = eval(written, dict(names))
            except NameError:
                pattern = next(made, 0)
                assert pattern != 0, f"{place}: give MADE an expression that is made here"
            used = {node.func.attr}
            if used == {"compile"} and node in assigned:
                used = uses.get(assigned[node], SEARCHES)
            elif used == {"compile"}:
                used = (
                    {"match"} if name == "cdrmix.config.loader" else SEARCHES
                )  # YAML matches the forms of its scalars
            if pattern is not None:
                yield Expression(
                    place, re.compile(pattern, value), used & (SEARCHES | {"match", "fullmatch"}) or SEARCHES
                )


def sample(parsed: Any, draw: random.Random) -> str:
    """A text that the parsed expression matches, apart from what it looks at ahead and behind."""
    text = ""
    for code, argument in parsed:
        if code is codes.LITERAL:
            text += chr(argument)
        elif code in (codes.NOT_LITERAL, codes.ANY):
            text += "x"
        elif code is codes.IN:
            text += character(argument, draw)
        elif code is codes.BRANCH:
            text += sample(draw.choice(argument[1]), draw)
        elif code is codes.SUBPATTERN:
            text += sample(argument[3], draw)
        elif code is codes.ATOMIC_GROUP:
            text += sample(argument, draw)
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            least, most, inner = argument
            for _ in range(draw.randint(least, min(least + 2, int(most)))):
                text += sample(inner, draw)
        else:
            assert code in (codes.AT, codes.ASSERT, codes.ASSERT_NOT, codes.GROUPREF, codes.FAILURE), code
    return text


def character(choices: Any, draw: random.Random) -> str:
    """A character of a class."""
    if choices[0][0] is codes.NEGATE:
        return draw.choice([c for c in "a1 -" if not re.match(f"[{re.escape(c)}]", members(choices[1:]))] or ["é"])
    return draw.choice(members(choices))


def members(choices: Any) -> str:
    """Some characters that the parts of a class name."""
    some = {
        codes.CATEGORY_DIGIT: "1",
        codes.CATEGORY_WORD: "a1",
        codes.CATEGORY_SPACE: " \n",
        codes.CATEGORY_NOT_SPACE: "a-",
    }
    found = ""
    for code, argument in choices:
        if code is codes.LITERAL:
            found += chr(argument)
        elif code is codes.RANGE:
            found += chr(argument[0]) + chr(argument[1])
        elif code is codes.CATEGORY:
            found += some.get(argument, "a")
    return found or "a"


def hostile(pattern: re.Pattern[Any], size: int, draw: random.Random) -> Iterator[Callable[[int], Any]]:
    """Functions from a size to a text: a match of which a part is repeated, and that does not end as a match does."""
    source = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    for _ in range(9):
        text = sample(parser.parse(source, pattern.flags & ~re.UNICODE), draw)[:24]
        parts = [
            (start, stop) for start in range(len(text)) for stop in range(start + 1, min(start + 5, len(text) + 1))
        ]
        for start, stop in draw.sample(parts, min(size, len(parts))):

            def made(length: int, text: str = text, start: int = start, stop: int = stop) -> Any:
                whole = text[:start] + pumped(text[start:stop], length) + text[stop:-1] + "\0!"
                return whole if isinstance(pattern.pattern, str) else whole.encode("latin-1", "replace")

            yield made


@pytest.mark.slow  # the CPU time of every expression on every hostile text
def test_regular_expressions() -> None:
    """All of the package. Where 8 kB take more than 4 ms, 40 kB must not take quadratic time."""
    count = 0
    for expression in expressions():
        count += 1
        for made in hostile(expression.pattern, 40, random.Random(ascii(expression.pattern.pattern))):
            few = made(8000)
            if cpu_time(expression.run, few, 0.004) > 0.004:
                many = made(40_000)
                assert cpu_time(expression.run, many, 0.1) < 0.1, (expression.place, few[:40])
    assert count > 50


@pytest.mark.parametrize("source", [r"(?m)^(?:async )?def \w+\(.*\)(?: *->.*)?:(?=[ \t]*\n)", r"\s*x", r"\[.*?\]"])
def test_the_test_finds_expressions_that_take_quadratic_time(source: str) -> None:
    expression = Expression("here", re.compile(source), SEARCHES)
    slow = (made(8000) for made in hostile(expression.pattern, 40, random.Random(source)))
    assert any(cpu_time(expression.run, text, 0.004) > 0.004 for text in slow)
