"""The mutation check's list fits the code: `make mutations` runs it."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def listed() -> Any:
    folder = str(ROOT / "tests" / "mutations")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("mutations").MUTATIONS
    finally:
        sys.path.remove(folder)


@pytest.mark.parametrize("mutation", listed(), ids=lambda mutation: mutation.name)
def test_an_error_can_be_put_in_and_its_tests_are_there(mutation: Any) -> None:
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    changed = text.replace(mutation.old, mutation.new)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    for test in mutation.tests:
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0] or 'test_'}" in (ROOT / path).read_text(encoding="utf-8")
