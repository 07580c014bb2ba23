"""Limits on the size of what a reader has to take in at once, and on imports that hide in functions."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_HIDDEN_IMPORTS = 100
"""Libraries that must not load early are named at the top by `lazy_module`; what is left costs a command its start."""


@cache
def _sources() -> dict[Path, str]:
    return {file.relative_to(ROOT): file.read_text() for file in sorted((ROOT / "autotune").rglob("*.py"))}


def _functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_no_file_is_long() -> None:
    assert len(_sources()) > 200
    assert {file for file, text in _sources().items() if text.count("\n") > MAX_FILE_LINES} == set()


def test_no_function_is_long() -> None:
    found = [
        (str(file), node.name)
        for file, text in _sources().items()
        for node in _functions(ast.parse(text))
        if node.end_lineno and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert found == []


def test_few_imports_hide_in_functions() -> None:
    hidden = {
        (file, node.lineno)
        for file, text in _sources().items()
        for function in _functions(ast.parse(text))
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert 0 < len(hidden) < MAX_HIDDEN_IMPORTS
