"""The syntax of source files, each parsed once a process for all tests that look at it."""

import ast
from functools import cache
from pathlib import Path


def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """Every node of a source, parents before what they hold."""
    return tuple(ast.walk(ast.parse(source)))


@cache
def nodes_in(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file."""
    return nodes_of(path.read_text(encoding="utf-8"))
