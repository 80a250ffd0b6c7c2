"""Every file and every name of docs/walk.md exists: a name belongs to the file that was named last before it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "walk.md"
_SPAN = re.compile(r"`([^`\n]+)`")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_STEP = re.compile(r"^ *(?=#|\d+\. |- )", re.MULTILINE)


def defined(path: Path) -> set[str]:
    """`function`, `Class` and `Class.method` of a Python file; of another, every word."""
    if path.suffix != ".py":
        return set(re.findall(r"\w+", path.read_text()))
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (ast.FunctionDef, ast.AsyncFunctionDef)
            names |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, inner)}
    return names


def faults(text: str, root: Path = ROOT) -> list[str]:
    """What a page says that is not so, in its order. A step (a heading, an item of a list) starts without a file."""
    found: list[str] = []
    met: dict[str, set[str]] = {}
    for step in _STEP.split(_FENCE.sub("", text)):
        names: set[str] | None = None
        file = ""
        for span in _SPAN.findall(step):
            if re.fullmatch(r"[\w./-]+/[\w.-]+\.\w+", span):
                file, path = span, root / span
                names = defined(path) if path.is_file() else None
                if names is None:
                    found.append(f"{file}: no such file")
                met[file] = names or set()
            elif re.fullmatch(r"[A-Za-z_][\w.]*", span):
                known = names if names is not None and span in names else set().union(*met.values())
                if span not in known:
                    found.append(f"{span}: not in {file or 'any file before it'}")
            elif not span.startswith(("dpiframe ", "POST ")):
                found.append(f"{span}: neither a file nor a name nor a command")
    return found


def test_every_file_and_name_of_the_walk_exists() -> None:
    assert faults(PAGE.read_text()) == []


def test_the_walk_fits_two_screens_and_passes_through_every_room_of_a_request() -> None:
    text = PAGE.read_text()
    request, model = text.partition("## A request")[2].partition("## A model")[::2]
    assert max(len(request.splitlines()), len(model.splitlines())) <= 50
    for room in (
        "deployments/http_api",
        "dpiframe_core/features",
        "deployments/batching",
        "dpiframe_core/engine",
        "deployments/fanin",
    ):
        assert f"`{room}/" in request, room


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "noun.py").write_text("def f(): ...\nclass A:\n    async def g(self): ...\n    def h(self): ...\n")
    (tmp_path / "room" / "noun.cu").write_text("__global__ void lookup(int rows) {}\n")
    return tmp_path


def test_right_names_pass(root: Path) -> None:
    assert (
        faults("1. `room/noun.py`: `f`, `A` and `A.g`; `dpiframe serve x`.\n2. `room/noun.cu`: `lookup`. Again `A.h`.", root)
        == []
    )
    assert faults("```text\n`gone`\n```\n", root) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("`room/gone.py`", "room/gone.py: no such file"),
        ("`room/noun.py`: `g`", "g: not in room/noun.py"),
        ("`room/noun.py`: `A.f`", "A.f: not in room/noun.py"),
        ("`room/noun.cu`: `look`", "look: not in room/noun.cu"),
        ("`f` of nothing", "f: not in any file before it"),
        ("`room/noun.py`: `f()`", "f(): neither a file nor a name nor a command"),
    ],
)
def test_a_wrong_name_is_found(root: Path, text: str, fault: str) -> None:
    assert faults(text, root) == [fault]
