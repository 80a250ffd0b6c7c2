"""docs/models.md tells the truth: its code runs, and it names every parameter of every model, and no other."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dpiframe_core.graph.architecture import DCN, DeepFM, WideDeep
from dpiframe_core.models.build import build_graph
from tests import model_oracle
from tests.docs.test_readme import blocks
from tests.dpiframe_core.models.test_library_models import CASES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "models.md").read_text()
SECTIONS = {match[1]: match[2] for match in re.finditer(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)}
OWN = {
    "wide_deep": "Wide & Deep, DeepFM", "deepfm": "Wide & Deep, DeepFM", "xdeepfm": "xDeepFM", "dcn": "DCN", "dcnv2": "DCN-V2",
    "din": "DIN", "dlrm": "DLRM", "dlrm_dcnv2": "DLRM-DCNv2",
}  # fmt: skip
MORE = {
    "wide_deep": (WideDeep(hidden_units=(4,)), {"first_order": True}),
    "deepfm": (DeepFM(hidden_units=(4,)), {"first_order": True}),
    "dcn": (DCN(cross_layers=2, hidden_units=(4,)), {}),
}


def form(name):
    """A parameter's name without its indices and without the number of the activation's layer."""
    return re.sub(r"\.(\d+|\{\w\})(?=\.)", ".{}", name)


def documented(section):
    return {
        form(name) for name in re.findall(r"`([a-z]+(?:\.\{?\w+\}?)*\.(?:weight|bias|alpha|scale|shift))`", SECTIONS[section])
    }


@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_every_parameter_of_a_model_is_on_the_page(name):
    architecture, options = (CASES | MORE)[name]
    graph = build_graph(architecture, model_oracle.make_schema(**options))
    of_activations = {n for n in map(form, graph.params) if n.endswith(("alpha", "scale", "shift")) and "attention" not in n}
    assert set(map(form, graph.params)) - of_activations <= documented(OWN[architecture.type])


@pytest.mark.parametrize("section", sorted(set(OWN.values())))
def test_the_page_names_no_parameter_that_no_model_has(section):
    found = set()
    for architecture, options in (CASES | MORE).values():
        if OWN[architecture.type] == section:
            found |= set(map(form, build_graph(architecture, model_oracle.make_schema(**options)).params))
    assert documented(section) <= found


def test_the_page_has_a_section_for_every_hyper_parameter():
    for architecture, _ in (CASES | MORE).values():
        section = SECTIONS[OWN[architecture.type]]
        assert all(f"`{key}`" in section for key in type(architecture).model_fields if key != "type"), architecture.type


def test_the_code_of_the_page_runs():
    (block,) = [b for b in blocks(PAGE) if b.language == "python"]
    done = subprocess.run(
        [sys.executable, "-c", block.code], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "attention.0.0.weight (64, 64)" in done.stdout
