"""`dpiframe import --dry-run` says what it found and writes nothing; a bar is shown on a terminal alone."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner

from deployments.cli import import_command
from deployments.cli.main import app
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.importers import writing

DIM, ROWS = 4, (50, 40, 30)
DESCRIBED: dict[str, dict[str, Any]] = {
    "s0": {"vocabulary": "s0.json", "values": "string", "missing_id": 0, "oov_id": 1, "scope": "context"},
    "s1": {},
    "s2": {"max_values": 3},
}


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A folder with a DLRM's checkpoint, its spec and a vocabulary."""
    made = torch.Generator().manual_seed(1)
    tables = {f"emb_l.{i}.weight": torch.rand(n, DIM, generator=made) - 0.5 for i, n in enumerate(ROWS)}
    layers = {"bot_l.0": (DIM, 2), "top_l.0": (8, DIM + 6), "top_l.2": (1, 8)}
    dense = {f"{name}.weight": torch.rand(shape, generator=made) - 0.5 for name, shape in layers.items()}
    torch.save(tables | dense | {f"{name}.bias": torch.zeros(shape[0]) for name, shape in layers.items()}, tmp_path / "m.pt")
    numbers = [{"kind": "dense", "name": "n0", "missing_value": 0.5}, {"kind": "dense", "name": "n1"}]
    features = [*numbers, *({"name": name} | how for name, how in DESCRIBED.items())]
    settings = {"arch_interaction_op": "dot", "arch_interaction_itself": False}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({"model": "DLRM_Net", "features": features, "settings": settings}))
    (tmp_path / "s0.json").write_text(json.dumps({"a": 2, "b": 3, "c": 4}))
    return tmp_path


def command(given: Path, *more: str) -> Any:
    return CliRunner().invoke(app, ["import", "dlrm", str(given / "m.pt"), "--spec", str(given / "spec.yaml"), *more])


@pytest.mark.parametrize("out", [(), ("-o", "bundle")])
def test_a_dry_run_says_what_it_found_and_writes_nothing(
    given: Path, out: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(given)
    before = {p: p.stat().st_mtime_ns for p in given.rglob("*")}
    done = command(given, "--dry-run", *out)
    assert done.exit_code == 0, done.output
    assert "facebookresearch DLRM_Net: dlrm, tasks click" in done.stdout
    assert "5 features" in done.stdout
    rows = [re.sub(" {2,}", " | ", r.strip()) for r in done.stdout.splitlines()]
    assert "s0 | context | text, 3 known | s0 | row 0 | row 1" in rows
    assert "s1 | candidate | integers, identity | s1 | refused | refused" in rows
    assert "s2 | candidate | integers, identity, up to 3, sum | s2 | nothing | refused" in rows
    assert "n0 | candidate | number | 0.5" in rows
    assert "n1 | candidate | number | refused" in rows
    assert "3 tables, 0.0 MiB" in done.stdout
    assert "s0 | 50 x 4 | 0.0 MiB" in rows
    assert "6 dense parameters, 109 numbers; every parameter of the checkpoint has its place" in rows
    assert "deep.0.weight | 8 x 10" in rows
    assert {p: p.stat().st_mtime_ns for p in given.rglob("*")} == before


def test_a_dry_run_finds_the_faults_that_an_import_would(given: Path) -> None:
    saved = torch.load(given / "m.pt", weights_only=True)
    torch.save(saved | {"extra.weight": torch.zeros(2)}, given / "m.pt")
    done = command(given, "--dry-run")
    assert done.exit_code == 1
    assert "1 parameters left over" in done.output


def test_an_import_without_a_place_for_the_bundle_is_refused(given: Path) -> None:
    done = command(given)
    assert done.exit_code == 1
    assert "--out: got nothing, expected the directory of the new bundle, or --dry-run" in done.output


def test_what_an_import_writes_is_shown_on_a_terminal_and_not_elsewhere(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = command(given, "-o", str(given / "plain"))
    assert done.exit_code == 0, done.output
    assert "Writing" not in done.output
    assert "Comparing" not in done.output
    screen = io.StringIO()
    monkeypatch.setattr(import_command, "err", Console(file=screen, force_terminal=True, width=100))
    done = command(given, "-o", str(given / "shown"))
    assert done.exit_code == 0, done.output
    assert "Comparing" in screen.getvalue()
    assert "1.9/1.9 KiB" in screen.getvalue()
    assert read_bundle(given / "shown").manifest.tasks == ("click",)


def test_each_step_of_an_import_is_told(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    @contextmanager
    def kept() -> Iterator[Callable[[str, int, int], None]]:
        yield lambda what, done, total: told.append(what)

    monkeypatch.setattr(import_command, "_progress_bar", kept)
    assert command(given, "-o", str(given / "bundle")).exit_code == 0
    told = ["Writing" if what.startswith("Writing ") else what for what in told]
    assert list(dict.fromkeys(told)) == ["Checking the vocabularies", "Scoring by the source", "Writing", "Comparing"]


READERS = {"dlrm": "dlrm", "torchrec": "dlrm", "recbole": "recbole.", "torch-rechub": "rechub", "deepctr-torch": "deepctr."}


@pytest.mark.slow
def test_an_import_that_is_asked_to_end_leaves_nothing_behind(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` and a container's stop send SIGTERM, which ends a process without its `finally`."""
    seen = []

    def ended(staging: Path, *_: Any) -> None:
        seen.extend(p.name for p in staging.iterdir())
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(writing, "move_into_place", ended)
    before = sorted(given.iterdir())
    done = command(given, "-o", str(given / "bundle"))
    assert "model.yaml" in seen
    assert (done.exit_code, sorted(given.iterdir())) == (130, before)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_readers_of_other_libraries_are_not_imported() -> None:
    """Each command in a fork of one process that has imported what all import."""
    code = """if True:
        import os, pathlib, sys
        import torch
        from deployments.cli.import_command import _source_model
        for library, source in (("dlrm", None), ("recbole", None), ("torch-rechub", "x.py:X")):
            if os.fork() == 0:
                try:
                    _source_model(library, pathlib.Path("none"), pathlib.Path("none"), source)
                except Exception as error:
                    modules = (name.removeprefix("dpiframe_core.importers.") for name in sys.modules)
                    print(library, type(error).__name__, *modules, flush=True)
                os._exit(0)
            os.wait()
        """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in said] == [[library, "InputError"] for library in ("dlrm", "recbole", "torch-rechub")]
    for library, _, *modules in said:
        others = tuple(reader for reader in READERS.values() if reader != READERS[library])
        assert [name for name in modules if name.startswith(others)] == []
