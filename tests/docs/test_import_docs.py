"""The pages "I trained X, now what": their code runs, block by block, in a folder of their own.

A fence may name a file behind its language; it is written there. A page whose library is not installed is skipped; checkpoints
that a page cannot make itself are made here.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dpiframe_core.importers.deepctr.checkpoint import _MODELS as DEEPCTR
from dpiframe_core.importers.fuxictr.run import IMPORTED
from dpiframe_core.importers.recbole.checkpoint import SEQUENTIAL
from dpiframe_core.importers.recbole.models import MODELS as RECBOLE
from dpiframe_core.importers.rechub import _MODELS as RECHUB
from tests.deployments.command import dpiframe_here
from tests.docs.test_readme import FENCE, ROOT
from tests.dpiframe_core.importers.peers import RUNS, library
from tests.dpiframe_core.importers.recbole.cases import BY_NAME
from tests.dpiframe_core.importers.recbole.test_recbole import stored_files
from tests.dpiframe_core.importers.test_dlrm import Facebook, TorchRec

PAGES = sorted((ROOT / "docs").glob("import-*.md"))
STARTED = "import-fuxictr"  # its `dpiframe import` is a process, as a user starts it; those of the others run here
LIBRARIES = {"import-deepctr-torch": "deepctr_torch", "import-torch-rechub": "torch_rechub"}
RUN = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-W", "ignore", "-c"]}


def prepare(page: str, folder: Path) -> None:
    if page in LIBRARIES:
        library(LIBRARIES[page])
    elif page == "import-dlrm":
        torch.save(Facebook([9], [8], False).state_dict(), folder / "dlrm.pt")
    elif page == "import-recbole":
        (folder / "run").mkdir()
        stored_files(BY_NAME["deepfm"], folder / "run")  # what the page's script writes
    elif page == "import-torchrec":
        torch.save(TorchRec([9], [8], 4).state_dict(), folder / "dlrm.pt")
    elif RUNS.is_dir():
        shutil.copytree(RUNS / "dcn", folder / "run")
        for path in [folder / "run", *(folder / "run").iterdir()]:
            path.chmod(0o755)
    else:
        pytest.skip("the FuxiCTR runs are not beside this checkout")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    prepare(page.stem, tmp_path)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "dpiframe"  # this checkout's, whatever is installed
    command.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'from deployments.cli.main import command; command()' \"$@\"\n")
    command.chmod(0o755)
    paths = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    ran = 0
    for match in FENCE.finditer(page.read_text()):
        first = match[0].splitlines()[0 if match["reason"] is None else 1]
        named = first.removeprefix("```").removeprefix(match["language"]).strip()
        if named:
            (tmp_path / named).write_text(match["code"])
        elif match["reason"] is None:
            if match["language"] == "bash" and page.stem != STARTED:
                name, *arguments = shlex.split(match["code"])
                assert name == "dpiframe"
                done = dpiframe_here(*arguments, cwd=tmp_path)
            else:
                done = subprocess.run(
                    [*RUN[match["language"]], match["code"]], cwd=tmp_path, env=os.environ | paths, capture_output=True,
                    text=True, timeout=200, check=False,
                )  # fmt: skip
            assert done.returncode == 0, f"{match['code']}\n{done.stdout}\n{done.stderr}"
            ran += 1
    assert ran >= 1
    assert (tmp_path / "bundle" / "model.yaml").exists()


def test_every_library_has_its_page() -> None:
    assert [page.stem.removeprefix("import-") for page in PAGES] == [
        "deepctr-torch",
        "dlrm",
        "fuxictr",
        "recbole",
        "torch-rechub",
        "torchrec",
    ]


def test_the_table_of_models_has_each_that_is_imported_by_name_and_no_other():
    page = (ROOT / "docs" / "imported-models.md").read_text()
    rows = re.findall(r"^\| ([\w-]+) \| (\w+) \| ", page, re.MULTILINE)
    imported = {"FuxiCTR": IMPORTED, "DeepCTR-Torch": DEEPCTR, "torch-rechub": RECHUB, "RecBole": {*RECBOLE, *SEQUENTIAL}}
    for name, models in imported.items():
        assert sorted(model for of, model in rows if of == name) == sorted(models), name
