"""README.md, docs/performance*.md and every RESULTS.md say what the stored results say."""

import re
from pathlib import Path

import pytest

from benchmarks.records.run import RESULTS
from benchmarks.report import pages, results_page, speed_chart
from benchmarks.report.markdown import filled, parts_of, times_over
from benchmarks.report.results import Results

MACHINES = sorted(p for p in RESULTS.iterdir() if p.is_dir())
WRITE = "run `python -m benchmarks report`"


@pytest.mark.parametrize("page", pages.PAGES)
def test_the_generated_parts_of_a_page_are_what_the_stored_results_make(page: str) -> None:
    text = (pages.ROOT / page).read_text()
    assert parts_of(text), f"{page} has no generated part"
    assert parts_of(text) == parts_of(pages.written_anew(page)), WRITE
    assert text == pages.written_anew(page), WRITE


def test_every_part_that_is_made_stands_on_a_page() -> None:
    stored = {p.name: Results.read(p) for p in MACHINES}
    shown = [name for page in pages.PAGES for name in parts_of((pages.ROOT / page).read_text())]
    assert set(shown) == set(pages.parts(stored, ""))


@pytest.mark.parametrize("folder", MACHINES, ids=lambda p: p.name)
def test_a_machines_results_page_is_what_its_records_make(folder: Path) -> None:
    assert (folder / "RESULTS.md").read_text() == results_page.page(Results.read(folder)), WRITE


@pytest.mark.parametrize("folder", MACHINES, ids=lambda p: p.name)
def test_a_machines_folder_holds_its_records_and_what_is_made_of_them_alone(folder: Path) -> None:
    shown = set(re.findall(r"!\[[\w-]+\]\(([\w-]+\.png)\)", (folder / "RESULTS.md").read_text()))
    assert {p.name for p in folder.iterdir() if p.suffix != ".json"} == {"RESULTS.md", *shown}


def test_the_picture_shows_the_stored_figures() -> None:
    assert speed_chart.drawn(pages.PICTURE) == speed_chart.speeds(Results.read(RESULTS / "h200")), WRITE


def test_the_picture_has_every_model_and_batch_size_of_both_precisions() -> None:
    shown = speed_chart.drawn(pages.PICTURE)
    assert list(shown) == ["tf32", "bf16"]
    for models in shown.values():
        assert list(models) == ["Wide&Deep", "DeepFM", "DCN", "DCN-V2"]
        assert all(list(sizes) == ["1", "64", "256", "1024", "4096"] for sizes in models.values())


def test_the_readmes_table_has_six_rows_at_most_and_each_links_to_its_record() -> None:
    (summary,) = parts_of((pages.ROOT / "README.md").read_text()).values()
    rows = [line for line in summary.splitlines() if line.startswith("|")][2:]
    assert 0 < len(rows) <= 6
    assert all("](benchmarks/results/" in row for row in rows)


def test_a_part_is_written_between_its_comments_and_nothing_else_is_touched() -> None:
    page = "# T\n<!-- generated: a -->\nold\n<!-- end -->\nwords\n<!-- generated: b -->\n<!-- end -->\n"
    text = filled("page", page, {"a": ["new"], "b": ["1", "2"]})
    assert parts_of(text) == {"a": "\nnew\n\n", "b": "\n1\n2\n\n"}
    assert text.startswith("# T\n<!-- generated: a -->\n")
    assert "<!-- end -->\nwords\n<!-- generated: b -->" in text
    assert filled("page", text, {"a": ["new"], "b": ["1", "2"]}) == text


def test_a_part_that_nothing_makes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^page: got a generated part 'c', expected one of a, b$"):
        filled("page", "<!-- generated: c -->\n<!-- end -->\n", {"a": [], "b": []})


def test_speed_ups_are_told_as_geometric_mean_least_and_most() -> None:
    assert times_over([1.0, 4.0]) == "2.00x (1.00x to 4.00x)"
