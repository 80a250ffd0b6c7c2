"""The three packages stay small: a budget on their lines of code, which the README states too.

Blank lines, comments and docstrings are free, so that nobody saves on them.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUDGET = 47_400
FREE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def python_lines(source: str) -> int:
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in FREE:
            used.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node) is not None
        ):
            text = node.body[0]
            used.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(used)


def cuda_lines(source: str) -> int:
    source = re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL)
    return sum(1 for line in source.splitlines() if line.strip() and not line.lstrip().startswith("//"))


def test_the_three_packages_stay_within_the_line_budget() -> None:
    lines = {}
    for package in ("kernels", "dpiframe_core", "deployments"):
        python = sum(python_lines(path.read_text()) for path in (ROOT / package).rglob("*.py"))
        native = [*(ROOT / package).rglob("*.cu*"), *(ROOT / package).rglob("*.[ch]")]
        lines[package] = python + sum(cuda_lines(path.read_text()) for path in native)
    assert all(lines.values())
    assert sum(lines.values()) <= BUDGET, lines


def test_only_code_counts() -> None:
    source = (
        '"""Doc\nstring."""\n\n# why\nx = (\n    1,  # one\n    2,\n)\n\n\ndef f():\n    """Doc."""\n    return """a\nb"""\n'
    )
    assert python_lines(source) == 4 + 1 + 2
    assert cuda_lines("// why\n/* a\n b */\n\nint x;  // code\n}\n") == 2


def test_the_readme_states_the_budget() -> None:
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README yet")
    assert f"{BUDGET:,} lines" in readme.read_text()
