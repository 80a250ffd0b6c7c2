"""What is told of the files that a configuration names, before anything starts: the key, what is there, and the rule."""

import os
from pathlib import Path
from typing import Any

import pytest

from deployments.config import parse_config
from deployments.preflight.named_files import faults_of_files
from dpiframe_core.graph.architecture import DeepFM
from tests.deployments.access.token_files import made
from tests.deployments.tls.certificates import certificate
from tests.runner import small_bundle


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    (folder / "models").mkdir()
    for name in ("a", "b"):
        small_bundle(folder / "models" / name, DeepFM(hidden_units=(4,)))
    made(folder / "tokens.yaml", ranker=["score"])
    for name in ("one", "other"):
        certificate(folder, name)
    small_bundle(folder / "littered", DeepFM(hidden_units=(4,)))
    (folder / "littered" / "scored.parquet").touch()
    (folder / "plan").mkdir()
    (folder / "plan" / "placement.json").write_text('{"format": "dpiframe-placement/1", "gpus": 1, "tables": []}')
    (folder / "damaged").mkdir()
    (folder / "damaged" / "model.yaml").write_text("format: dpiframe-bundle/1\nname: [\n")
    return folder


def told(place: Path, models: list[dict[str, Any]] | None = None, **more: Any) -> list[str]:
    """The faults, without the folder's own path."""
    given = {"models": models or [{"path": "models/a"}], **more}
    with_places = parse_config(given, "test")
    before = Path.cwd()
    os.chdir(place)  # relative paths start there
    try:
        return [fault.replace(f"{place}/", "") for fault in faults_of_files(with_places)]
    finally:
        os.chdir(before)


def test_sound_files_have_no_fault(place: Path) -> None:
    tls = {"certificate": "one.crt", "key": "one.key"}
    more = {"score_log": {"folder": "new/rows"}, "models_root": "models", "models_state": "state.json"}
    two = [{"path": "models/a"}, {"path": "models/b", "name": "b"}]
    assert told(place, two, http={"tls": tls}, access={"tokens": "tokens.yaml"}, **more) == []
    assert not (place / "new").exists()


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (
            {"models": [{"path": "none"}]},
            "models.0.path: got 'none', expected the directory of a model bundle (no model.yaml in",
        ),
        ({"models": [{"path": "damaged"}]}, "models.0.path: damaged/model.yaml: got "),
        (
            {"models": [{"path": "models/a"}], "models_root": "damaged"},
            "models.0.path: got 'models/a', which is 'models/a', exp",
        ),
        ({"access": {"tokens": "none.yaml"}}, "access.tokens: none.yaml: got 'No such file or directory', expected a readable"),
        ({"access": {"tokens": "one.crt"}}, "access.tokens: one.crt: got something else, expected a list of {name: NAME"),
        ({"score_log": {"folder": "one.crt/rows"}}, "score_log.folder: got 'one.crt' (no folder), expected a folder that this"),
        (
            {"http": {"direct_socket": "/none/s"}},
            "http.direct_socket: got '/none' (nothing there), expected a folder that this",
        ),
        (
            {"http": {"direct_socket": "/tmp/s", "direct_socket_group": "no such"}},
            "http.direct_socket_group: got 'no such', expected a group",
        ),
        (
            {"models": [{"path": "models/a", "tables": {"placement": "none"}}]},
            "models.0.tables.placement: got 'none', expected a directory that dpiframe plan wrote (no placement.json",
        ),
        (
            {"models": [{"path": "models/a", "tables": {"placement": "plan"}}]},
            "models.0.tables.placement: plan: tables: got [], expected the model's, [",
        ),
        (
            {"models": [{"path": "littered"}]},
            "models.0.path: littered/scored.parquet: got a file that model.yaml does not list, expected none",
        ),
        ({"models_state": "none/state.json", "models_root": "models"}, "models_state: got 'none' (nothing there), expected a "),
        ({"models_state": "one.crt", "models_root": "models"}, "models_state: one.crt: got "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_will_not_do_is_told_by_its_key(place: Path, given: dict[str, Any], fault: str) -> None:
    (line,) = told(place, **given)
    assert line.startswith(fault)


@pytest.mark.parametrize(
    ("certificate_file", "key", "fault"),
    [
        ("one.crt", "none.key", "http.tls.key: got 'none.key', expected a file that can be read"),
        ("one.crt", "other.key", "http.tls.certificate: got 'one.crt' (KEY_VALUES_MISMATCH), expected a PEM file"),
        ("tokens.yaml", "one.key", "http.tls.certificate: got 'tokens.yaml' ("),
    ],
)
def test_a_certificate_needs_a_key_of_its_own(place: Path, certificate_file: str, key: str, fault: str) -> None:
    tls = {"certificate": certificate_file, "key": key}
    (line,) = told(place, http={"tls": tls}, access={"open": True})
    assert line.startswith(fault)


def test_two_bundles_that_call_themselves_alike_are_refused_by_their_manifests(place: Path) -> None:
    (line,) = told(place, [{"path": "models/a"}, {"path": "models/b"}])
    assert line.startswith("models: got 'small' twice, expected distinct names")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_what_this_user_may_not_read_or_write_is_told(place: Path) -> None:
    closed = place / "closed"
    closed.mkdir(mode=0o500)
    (line,) = told(place, score_log={"folder": "closed/rows"})
    assert line.startswith("score_log.folder: got 'closed' (not to be written to), expected")


def test_every_fault_is_told_at_once(place: Path) -> None:
    given: dict[str, Any] = {"access": {"tokens": "none.yaml"}, "score_log": {"folder": "one.crt"}}
    keys = [line.split(":")[0] for line in told(place, [{"path": "none"}, {"path": "nowhere", "name": "x"}], **given)]
    assert keys == ["models.0.path", "models.1.path", "access.tokens", "score_log.folder"]
