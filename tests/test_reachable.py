"""Finds unused definitions: every name in cdrmix/ and kernels/ must be used there, or be part of a public interface.

The test compares names only. A definition counts as used if its name is read in cdrmix/ or kernels/ outside its own
body. An unused definition with the name of a used one is therefore not found; a used definition is never reported.
"""

from __future__ import annotations

import ast
import functools
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from source_trees import tree_of

import cdrmix

ROOT = Path(__file__).parents[1]
FILES = sorted(path for folder in ("cdrmix", "kernels") for path in (ROOT / folder).rglob("*.py"))
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

# Names that are not read in cdrmix/ or kernels/, and their use.
ALLOWED = {
    "FAMILIES": "keeps the modules imported that add tasks to the registry",
    "NEIGHBOURS": "a number of csrc/lsh.hpp that docstrings name and tests compare",
    "NO_BUCKET": "a number of csrc/lsh.hpp that docstrings name and tests compare",
    "OPS": "the public table of operators: tests and benchmarks run over it",
    "alternatives": "benchmarks/aot.py asks each kernel module by name what to compile ahead of time",
    "builds": "benchmarks/aot.py asks each kernel module by name what to compile ahead of time",
    "candidate_pairs": "docs/data.md: near-duplicates without the pipeline",
    "create_from_arg_string": "lm-eval calls it",
    "deduplicate": "docs/data.md: near-duplicates without the pipeline",
    "generate_until": "lm-eval calls it",
    "ignore_aliases": "PyYAML's dumper calls it",
    "loglikelihood": "lm-eval calls it",
    "loglikelihood_rolling": "lm-eval calls it",
    "long_rows": "benchmarks/aot.py asks each kernel module by name what to compile ahead of time",
    "plastic_lora_loop": "the formula token by token; tests compare every implementation with it",
    "run_progressive": "docs/api.md: a part of a ladder",
    "readable": "io.RawIOBase calls it",
    "readinto": "io.RawIOBase calls it",
    "score_tokens": "docs/data.md: tasks in ids, for the training loop of a user",
    "make_token_example": "docs/data.md: tasks in ids, for the training loop of a user",
}
# Methods and properties of the classes in cdrmix/hf that transformers reads.
ALLOWED |= {
    f"get_{kind}_parallel_{what}": "DeepSpeed calls it: Megatron's interface of process groups"
    for kind in ("data", "model")
    for what in ("group", "rank", "world_size")
}
ALLOWED |= dict.fromkeys(
    [
        "_init_weights",
        "_set_gradient_checkpointing",
        "_supports_default_dynamic_cache",
        "batch_repeat_interleave",
        "crop",
        "get_mask_sizes",
        "get_max_cache_shape",
        "get_max_length",
        "lazy_initialization",
        "register_for_auto_class",
        "reorder_cache",
        "reset",
        "set_input_embeddings",
        "to_dict",
        "to_json_file",
    ],
    "transformers reads it",
)
NODES = ("For", "CallBlock", "Call", "Filter", "Test", "Compare", "Concat", "Getitem")  # of Jinja2's syntax trees
ALLOWED |= dict.fromkeys(("call_binop", *(f"visit_{node}" for node in NODES)), "Jinja2 calls it")
# Parts of the names of decorators that register a definition.
REGISTERING = ("register", "rule", "task", "validator", "serializer", "overload")


def parsed() -> dict[str, ast.Module]:
    return {path.relative_to(ROOT).as_posix(): tree_of(path) for path in FILES}


@functools.cache
def reads(tree: ast.AST) -> Counter[str]:
    """How often each name is read: variables, attributes, and strings in getattr and hasattr. Imports do not count."""
    counts: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            counts[node.id] += 1
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            counts[node.attr] += 1
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            counts.update(each.value for each in node.args if isinstance(each, ast.Constant))
    return counts


def is_registered(node: Definition) -> bool:
    """Whether a decorator passes the definition to a registry, a library or a type checker."""
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        if name.isupper() or any(part in name for part in REGISTERING):
            return True
    return False


def definitions(tree: ast.Module) -> Iterator[tuple[str, int, ast.AST]]:
    """(name, line, body) of functions, classes, methods and constants, without registered ones."""
    for node in ast.walk(tree):
        if isinstance(node, Definition) and not is_registered(node):
            yield node.name, node.lineno, node
    for node in tree.body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, node.lineno, node


def unused(trees: Mapping[str, ast.Module]) -> list[str]:
    """`file:line name` of every definition whose name is read only in its own body, or nowhere."""
    total: Counter[str] = Counter()
    for tree in trees.values():
        total.update(reads(tree))
    return [
        f"{file}:{line} {name}"
        for file, tree in trees.items()
        for name, line, body in definitions(tree)
        if not (name.startswith("__") and name.endswith("__")) and name != "_" and total[name] <= reads(body)[name]
    ]


def test_everything_is_reached_without_tests_and_benchmarks() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].values()
    outside = {*ALLOWED, *cdrmix.__all__, *(script.partition(":")[2] for script in scripts)}
    lines = unused(parsed())
    wrong = [line for line in lines if line.rpartition(" ")[2] not in outside]
    assert not wrong, "used only by tests or benchmarks, or not at all: use it or delete it\n" + "\n".join(wrong)
    needless = ALLOWED.keys() - {line.rpartition(" ")[2] for line in lines}
    assert not needless, f"these are used: remove them from ALLOWED: {sorted(needless)}"


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
    trees = {"new.py": ast.parse("def called(): ...\ncalled()"), "other.py": ast.parse("def nobody_calls(): ...")}
    assert unused(trees) == ["other.py:1 nobody_calls"]
