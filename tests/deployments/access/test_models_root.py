"""`models_root`: no bundle and no link of one leads out of it."""

from pathlib import Path
from typing import Any

import pytest

from deployments.access.models_root import check_models_root
from deployments.config import parse_config
from dpiframe_core.errors import ConfigError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("models/ctr/tables", "models-of-others/ctr", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "elsewhere" / "secret").write_text("x")
    (tmp_path / "models" / "ctr" / "model.yaml").write_text("x")
    return tmp_path


def check(root: Path, path: str, **more: Any) -> None:
    check_models_root(parse_config({"models": [{"path": path, **more}], "models_root": str(root / "models")}, "test"))


def test_a_bundle_in_the_root_is_taken_also_through_links_that_stay_there(root: Path) -> None:
    (root / "models" / "current").symlink_to("ctr")
    (root / "models" / "ctr" / "tables" / "a").symlink_to("../model.yaml")
    (root / "entry").symlink_to("models")
    for path in ("models/ctr", "models/current", "models/../models/ctr", "entry/ctr", "models/not-yet"):
        check(root, str(root / path))
    check(root / "entry" / "..", str(root / "models" / "ctr"))


@pytest.mark.parametrize(
    "path", ["elsewhere", "models/../elsewhere", "models-of-others/ctr", "models/out", "models/deep/ctr", "/"]
)
def test_a_path_that_leads_out_is_refused(root: Path, path: str) -> None:
    (root / "models" / "out").symlink_to(root / "elsewhere")
    (root / "models" / "deep").symlink_to("../models-of-others")
    with pytest.raises(ConfigError) as caught:
        check(root, str(root / path))
    assert str(caught.value).startswith(f"models.0.path: got {str(root / path)!r}, which is ")
    assert str(caught.value).endswith(f"expected a place below models_root {str(root / 'models')!r}")


def test_a_path_of_no_file_is_refused_by_name(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.0\.path"):
        check(root, str(root / "models" / "a\0b"))


@pytest.mark.parametrize("name", ["model.yaml", "tables/t.safetensors", "vocab"])
def test_a_link_inside_a_bundle_that_leads_out_is_refused(root: Path, name: str) -> None:
    link = root / "models" / "ctr" / name
    link.unlink(missing_ok=True)
    link.symlink_to(root / "elsewhere" / ("secret" if "." in name else ""))
    with pytest.raises(ConfigError, match=name):
        check(root, str(root / "models" / "ctr"))


def test_the_placement_of_tables_is_confined_too(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.0\.tables\.placement: got "):
        check(root, str(root / "models" / "ctr"), tables={"placement": str(root / "elsewhere")})


def test_without_a_root_nothing_is_looked_at() -> None:
    check_models_root(parse_config({"models": [{"path": "/"}]}, "test"))


def test_a_relative_root_starts_at_the_working_directory_as_bundles_do(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    config = parse_config({"models": [{"path": "models/ctr"}], "models_root": "models"}, "test").with_absolute_paths()
    assert config.models_root == str(root / "models")
    monkeypatch.chdir("/")
    check_models_root(config)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's, at import
def test_every_way_to_a_bundle_looks_first(root: Path) -> None:
    """The launcher's, that of a replica with engines, and an ingress's."""
    import asyncio
    from types import SimpleNamespace

    from deployments.lifecycle.release import Release
    from deployments.serve.cluster import private_cluster
    from deployments.serve.ingress_replica import IngressReplica
    from deployments.serve.loaded_models import LoadedModels
    from deployments.serve.replica import Replica

    (root / "models-of-others" / "ctr" / "model.yaml").write_text("x")
    outside = {"models": [{"path": str(root / "models-of-others" / "ctr")}], "models_root": str(root / "models")}
    config = parse_config(outside, "test")
    with pytest.raises(ConfigError, match=r"models\.0\.path: got "), private_cluster(config, print):
        pytest.fail("started")

    release = Release(model="ctr", version="2", path=config.models[0].path, fingerprint="0" * 64)
    with pytest.raises(ConfigError, match=r"ctr/2\.path: got "):
        asyncio.run(LoadedModels(config).load(release))
    for replica in (IngressReplica, Replica):
        with pytest.raises(ConfigError, match=r"ctr/2\.path: got "):  # [0] is Serve's wrapper
            asyncio.run(replica.__mro__[1].load(SimpleNamespace(_config=config, _loaded=LoadedModels(config)), release))
        stand_in = SimpleNamespace(_config=config, _rows=None, _loaded=LoadedModels(config))
        with pytest.raises(ConfigError, match=r"models\.0\.path: got "):
            asyncio.run(replica.__mro__[1].__serve_build_asgi_app__(stand_in))
