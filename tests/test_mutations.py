"""The mutation check's list fits the code: `make mutations` runs it."""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "mutations"))
from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[1]


@functools.lru_cache(maxsize=1)  # the mutations of a file follow each other
def current(file: str) -> tuple[str, str]:
    """Its text and what that means."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return text, meaning(file, text)


def meaning(file: str, text: str) -> str:
    """The code without comments and white space, which change nothing."""
    if file.endswith(".py"):
        return ast.dump(ast.parse(text))
    return re.sub(r"//[^\n]*|\s+", "", text)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_an_error_can_be_put_in_and_its_tests_are_there(mutation: Mutation) -> None:
    text, meant = current(mutation.file)
    assert text.count(mutation.old) == 1
    changed = text.replace(mutation.old, mutation.new)
    assert meaning(mutation.file, changed) != meant
    for test in mutation.tests:
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0] or 'test_'}" in (ROOT / path).read_text(encoding="utf-8")
