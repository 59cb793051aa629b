"""The syntax trees of source files, each read and parsed once."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def statements_of(path: Path) -> tuple[ast.AST, ...]:
    """All statements of a file, with the handlers and cases that have some: imports are among them."""
    found: list[ast.AST] = [tree_of(path)]
    for node in found:  # which grows
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            children = getattr(node, field, None)
            if isinstance(children, list):
                found += children
    return tuple(found)


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, as `ast.walk` gives them."""
    return tuple(ast.walk(tree_of(path)))
