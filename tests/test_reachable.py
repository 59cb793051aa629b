"""What no command, API or entry point reaches is not there: names that only tests and benchmarks use fail.

Names are compared, not what they mean: a definition is used where its name is read in cdrmix/ or kernels/ outside of
its own body. So what shares its name with something used is not found, and nothing that is used is.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import cdrmix

ROOT = Path(__file__).parents[1]
FILES = sorted(path for folder in ("cdrmix", "kernels") for path in (ROOT / folder).rglob("*.py"))
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

# Names that nothing here reads, and who does.
ALLOWED = {
    "FAMILIES": "keeps the modules imported that add tasks to the registry",
    "NEIGHBOURS": "a number of csrc/lsh.hpp that docstrings name and tests compare",
    "NO_BUCKET": "a number of csrc/lsh.hpp that docstrings name and tests compare",
    "OPS": "the public table of operators: tests and benchmarks run over it",
    "alternatives": "benchmarks/aot.py asks each kernel module by name what to compile ahead of time",
    "builds": "benchmarks/aot.py asks each kernel module by name what to compile ahead of time",
    "candidate_pairs": "README: near-duplicates by themselves",
    "deduplicate": "README: near-duplicates by themselves",
    "force": "tests and measurements choose who multiplies",
    "ignore_aliases": "PyYAML's dumper calls it",
    "long_rows": "benchmarks/aot.py asks each kernel module by name what to compile ahead of time",
    "plastic_lora_loop": "the formula token by token, to which tests compare every implementation",
    "readable": "io.RawIOBase calls it",
    "readinto": "io.RawIOBase calls it",
    "score_tokens": "tasks in ids of their own, for a caller's training loop: cdrmix.data.tasks",
    "make_token_example": "tasks in ids of their own, for a caller's training loop: cdrmix.data.tasks",
}
# Decorators by which something else calls what they decorate.
CALLERS = ("register", "rule", "task", "validator", "serializer", "overload")


def parsed() -> dict[str, ast.Module]:
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in FILES}


def reads(tree: ast.AST) -> Counter[str]:
    """How often each name is read: variables, attributes, and strings in getattr and hasattr. Imports do not count."""
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found[node.id] += 1
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found[node.attr] += 1
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            found.update(each.value for each in node.args if isinstance(each, ast.Constant))
    return found


def is_called_elsewhere(node: Definition) -> bool:
    """Whether a decorator hands the definition to a registry, a library or a type checker."""
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        if name.isupper() or any(caller in name for caller in CALLERS):
            return True
    return False


def definitions(tree: ast.Module) -> Iterator[tuple[str, int, ast.AST]]:
    """(name, line, its body) of functions, classes, methods and constants; those that others call are left out."""
    for node in ast.walk(tree):
        if isinstance(node, Definition) and not is_called_elsewhere(node):
            yield node.name, node.lineno, node
    for node in tree.body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, node.lineno, node


def unused(trees: Mapping[str, ast.Module]) -> list[str]:
    """`file:line name` of what is defined and read nowhere but in itself."""
    every: Counter[str] = Counter()
    for tree in trees.values():
        every += reads(tree)
    return [
        f"{file}:{line} {name}"
        for file, tree in trees.items()
        for name, line, body in definitions(tree)
        if not (name.startswith("__") and name.endswith("__")) and name != "_" and every[name] <= reads(body)[name]
    ]


def test_everything_is_reached_without_tests_and_benchmarks() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].values()
    outside = {*ALLOWED, *cdrmix.__all__, *(script.partition(":")[2] for script in scripts)}
    found = unused(parsed())
    wrong = [line for line in found if line.rpartition(" ")[2] not in outside]
    assert not wrong, "used by tests or benchmarks alone, or by nothing: wire it or delete it\n" + "\n".join(wrong)
    needless = ALLOWED.keys() - {line.rpartition(" ")[2] for line in found}
    assert not needless, f"these are used: take them off the list: {sorted(needless)}"


def test_a_new_unused_name_is_found() -> None:
    source = """
SIZE, UNUSED = 3, 4
LONE = 5
def used(): return SIZE
def recursive(n): return recursive(n - 1)
class Reader:
    def read(self): return used()
    def write(self): return self.write
@REGISTRY("name")
def registered(): ...
Reader().read()
"""
    trees = {"new.py": ast.parse(source)}
    assert unused(trees) == ["new.py:5 recursive", "new.py:8 write", "new.py:3 LONE"]
    trees = parsed()
    before = len(unused(trees))
    trees["cdrmix/new.py"] = ast.parse("def nobody_calls_this_function() -> None: ...")
    assert len(unused(trees)) == before + 1
