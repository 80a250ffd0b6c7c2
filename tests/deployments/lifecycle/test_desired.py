"""What a change makes of a desired state, against a list that a person would keep; and what a configuration asks for."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.config import parse_config
from deployments.config_tables import TablesHome
from deployments.lifecycle.desired import CanaryOf, Desired, ModelState, desired_of
from deployments.lifecycle.refusals import Conflict
from deployments.lifecycle.release import Release
from deployments.lifecycle.state_file import Remembered, StateFile
from dpiframe_core.errors import BundleError, ConfigError, DPIFrameError, ModelNotFound
from dpiframe_core.features.schema import FeatureSchema, Numeric


def release(version: str, model: str = "m", bundle: str = "") -> Release:
    return Release(model=model, version=version, path=f"/models/{bundle or version}", fingerprint=(bundle or version) * 8)


def one(*versions: str) -> Desired:
    """The first is live; those after it were put one after the other, without going live."""
    desired = Desired(models={"m": ModelState(releases=(release(versions[0]),), live=versions[0])})
    for version in versions[1:]:
        desired = desired.with_release(release(version), live=False)
    return desired


def test_a_version_that_goes_live_keeps_the_one_before_it_and_lets_go_of_the_one_before_that() -> None:
    state = one("1").with_release(release("2"), live=True).with_release(release("3"), live=True).model("m")
    assert (state.live, state.previous, state.versions) == ("3", "2", ("2", "3"))
    back = state.rolled_back()
    assert (back.live, back.previous, back.versions) == ("2", "3", ("2", "3"))
    assert back.rolled_back() == state


def test_a_version_with_a_part_of_its_own_stays_when_it_is_two_back() -> None:
    state = one("1").with_release(release("2"), live=True).model("m").with_shadow("1")
    desired = Desired(models={"m": state}).with_release(release("3"), live=True)
    assert desired.model("m").versions == ("1", "2", "3")


def test_a_canary_or_a_shadow_that_goes_live_is_one_no_longer() -> None:
    state = one("1", "2").model("m").with_canary(CanaryOf(version="2", percent=5))
    assert state.with_live("2").canary is None
    state = one("1", "2").model("m").with_shadow("2")
    assert state.with_live("2").shadow is None


@pytest.mark.parametrize(
    ("change", "kind", "why"),
    [
        (lambda d: d.model("m").without("1"), Conflict, "version: got '1', which is live, expected another one to be"),
        (lambda d: d.model("m").without("9"), ModelNotFound, r"version: got '9', expected one of \['1', '2'\], which are"),
        (lambda d: d.model("n"), ModelNotFound, r"model: got 'n', expected one of \['m'\]"),
        (lambda d: d.model("m").with_shadow("1"), Conflict, "version: got '1', which is live, expected another one beside it"),
        (lambda d: d.model("m").with_canary(CanaryOf(version="9", percent=1)), ModelNotFound, "version: got '9'"),
        (lambda d: d.model("m").rolled_back(), Conflict, "rollback: got no version before '1', expected one that was live"),
        (lambda d: d.changed("m", None), Conflict, "model: got 'm', the only one of this service, expected another one"),
        (lambda d: d.with_release(release("2", bundle="x"), live=True), Conflict,
         r"version: got '2' of another bundle than the one loaded \(22222222, /models/2\), expected a version of its own"),
        (lambda d: d.with_release(release("2").model_copy(update={"tables": TablesHome(hbm_gib=1)}), live=True), Conflict,
         r"version: got '2' of other tables or another path than the one loaded \(22222222, /models/2\), expected a ver"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_rule(change: object, kind: type[DPIFrameError], why: str) -> None:
    with pytest.raises(kind, match=why):
        change(one("1", "2"))  # type: ignore[operator]


@given(st.lists(st.tuples(st.sampled_from(["put", "load", "drop", "back", "canary", "shadow"]), st.sampled_from("1234"))))
def test_every_part_is_of_a_loaded_version_whatever_is_asked(asked: list[tuple[str, str]]) -> None:
    desired, answered_before = one("1"), ["1"]
    for what, version in asked:
        was = desired
        state = desired.model("m")
        try:
            match what:
                case "put" | "load":
                    desired = desired.with_release(release(version), live=what == "put")
                case "drop":
                    desired = desired.changed("m", state.without(version))
                case "back":
                    desired = desired.changed("m", state.rolled_back())
                case "canary":
                    desired = desired.changed("m", state.with_canary(CanaryOf(version=version, percent=50)))
                case "shadow":
                    desired = desired.changed("m", state.with_shadow(version))
        except DPIFrameError:
            assert desired is was
            continue
        state = desired.model("m")
        parts = {state.live, state.previous or state.live, state.shadow or state.live}
        parts |= {state.canary.version} if state.canary else set()
        assert parts <= set(state.versions)
        assert len(set(state.versions)) == len(state.versions)
        assert state.live not in (state.previous, state.shadow, state.canary and state.canary.version)
        assert desired.revision == was.revision + (desired != was)
        if what == "put":
            assert state.live == version
        if what == "back":
            assert state.live == answered_before[-1]
        if state.live != was.model("m").live:
            answered_before.append(was.model("m").live)
        assert state.previous in (None, answered_before[-1])


@pytest.fixture
def manifests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directories whose manifest is `name version`."""

    class Parsed:
        def __init__(self, text: bytes) -> None:
            self.name, self.version = text.decode().split()
            features = [Numeric(name=name) for name in ("user", f"of_{self.version}")]
            self.feature_schema = FeatureSchema.model_construct(features=tuple(features), tables=())

    monkeypatch.setattr("deployments.lifecycle.release.parse_manifest", Parsed)
    for name in ("ctr 1", "ctr 2", "ctr 3", "cvr 1"):
        (tmp_path / name.replace(" ", "-")).mkdir()
        (tmp_path / name.replace(" ", "-") / "model.yaml").write_text(name)
    return tmp_path


def configured(folder: Path, *models: dict[str, object]) -> Desired:
    return desired_of(parse_config({"models": [m | {"path": str(folder / str(m["path"]))} for m in models]}, "test").models)


def test_a_configuration_names_versions_with_their_parts(manifests: Path) -> None:
    desired = configured(
        manifests,
        {"path": "ctr-2", "canary": {"percent": 5, "by": "user"}},
        {"path": "ctr-1"},
        {"path": "ctr-3", "shadow": True},
        {"path": "cvr-1", "name": "buy", "version": "7"},
    )
    state = desired.model("ctr")
    assert (state.live, state.canary, state.shadow) == ("1", CanaryOf(version="2", percent=5, by="user"), "3")
    assert desired.model("buy").versions == ("7",)
    assert desired.revision == 0


@pytest.mark.parametrize(
    ("models", "why"),
    [
        (
            [{"path": "ctr-1"}, {"path": "ctr-2"}],
            r"models: got 'ctr' twice, expected distinct names \(give one of them",
        ),
        ([{"path": "ctr-1", "shadow": True}], "models: got 'ctr' as shadow alone, expected a version of it that is live"),
        ([{"path": "ctr-1"}, {"path": "ctr-2", "version": "1", "shadow": True}], "models: got version '1' of 'ctr' twice"),
        (
            [{"path": "ctr-1"}, {"path": "ctr-2", "shadow": True}, {"path": "ctr-3", "shadow": True}],
            "got a shadow of 'ctr' twice",
        ),
        (
            [{"path": "ctr-1"}, {"path": "ctr-2", "canary": {"percent": 5, "by": "of_2"}}],
            "models: canary.by: got 'of_2', expected a feature of both versions: user$",
        ),
    ],
)
def test_a_configuration_that_leaves_open_who_answers_is_refused(
    manifests: Path, models: list[dict[str, object]], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        configured(manifests, *models)


def test_one_entry_is_no_canary_and_shadow_at_once_and_a_state_file_needs_a_root() -> None:
    model = {"path": "m", "canary": {"percent": 1}, "shadow": True}
    with pytest.raises(ConfigError, match=r"models\.0\.canary: got both it and shadow, expected one of the two"):
        parse_config({"models": [model]}, "test")
    with pytest.raises(ConfigError, match="models_state: got a file without models_root, expected both"):
        parse_config({"models": [{"path": "m"}], "models_state": "s.json"}, "test")


def test_a_folder_that_holds_another_bundle_by_now_is_refused(manifests: Path) -> None:
    there = configured(manifests, {"path": "ctr-1"}).releases["ctr", "1"]
    there.check_fingerprint(there.fingerprint)
    with pytest.raises(BundleError, match="ctr-1: got a bundle with fingerprint 0000000000000000, expected "):
        there.check_fingerprint("0" * 64)
    with pytest.raises(BundleError, match=r"nothing/model\.yaml: got no such file, expected one in every bundle"):
        configured(manifests, {"path": "nothing"})


def test_a_state_is_remembered_whole_and_a_damaged_file_is_told(tmp_path: Path) -> None:
    file = StateFile(str(tmp_path / "state.json"))
    assert file.read() is None
    state = one("1", "2")
    state = state.changed("m", state.model("m").with_canary(CanaryOf(version="2", percent=12.5, by="user")))
    file.write(Remembered(digest="d", desired=state))
    assert file.read() == Remembered(digest="d", desired=state)
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    (tmp_path / "state.json").write_text(json.dumps({"digest": "d", "desired": {"models": 1}}))
    with pytest.raises(ConfigError, match=r"state\.json: desired\.models: got 1, expected .*; without it the configuration"):
        file.read()
    for text in ("", '{"digest": "d", "des'):
        (tmp_path / "state.json").write_text(text)
        with pytest.raises(
            ConfigError, match=r"state\.json: got '\d+ bytes that are no JSON .*, expected what a service left th"
        ):
            file.read()
    left = Remembered(digest="d", desired=state).model_dump(mode="json")
    for part, version in (("live", "9"), ("shadow", "9"), ("previous", "9"), ("canary", {"version": "9", "percent": 1})):
        models = {"m": left["desired"]["models"]["m"] | {part: version}}
        (tmp_path / "state.json").write_text(json.dumps(left | {"desired": left["desired"] | {"models": models}}))
        with pytest.raises(ConfigError, match=rf"state\.json: .*{part}: got '9', expected a version among releases: 1, 2"):
            file.read()
    StateFile(None).write(Remembered(digest="d", desired=state))
    assert StateFile(None).read() is None
