"""What is wrong with the files that a configuration names, as far as they can be looked at before anything starts.

It starts nothing, binds nothing and needs no GPU. It must run where the service does, as its user. It reads no weights.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from deployments.access.models_root import check_below
from deployments.access.tokens import read_tokens
from deployments.config import DeploymentConfig
from deployments.host_sockets.listening import group_id
from deployments.lifecycle.desired import desired_of
from deployments.lifecycle.state_file import StateFile
from deployments.tls.front import check_certificate
from dpiframe_core.bundle.encoding_files import check_listed, named
from dpiframe_core.bundle.manifest import MANIFEST_FILE, parse_manifest
from dpiframe_core.embedding.placement_file import PLACEMENT_FILE, check_placement
from dpiframe_core.errors import BundleError, ConfigError, DPIFrameError


def require_files(config: DeploymentConfig) -> None:
    """Raises ConfigError, a line a fault."""
    faults = faults_of_files(config)
    if faults:
        raise ConfigError("\n".join(faults))


def faults_of_files(config: DeploymentConfig) -> list[str]:
    """Of bundles (their manifests, and which files there are), placements, tokens, certificates, and folders to write to:
    `<key>: got .., expected ..` each.
    """
    config = config.with_absolute_paths()
    faults: list[str] = []

    def look(key: str, check: Callable[[], object]) -> None:
        try:
            check()
        except OSError as error:
            faults.append(f"{key}: got {error.filename!r} ({error.strerror}), expected a file that this user may read")
        except DPIFrameError as error:
            faults.append(f"{error}" if f"{error}".startswith(key.removesuffix("path")) else f"{key}: {error}")

    for i in range(len(config.models)):
        look(f"models.{i}.path", partial(_check_bundle, config, i))
    if not faults:  # what the bundles call themselves, for models that the configuration gives no name
        look("models", lambda: desired_of(config.models))
    if config.access is not None and config.access.tokens is not None:
        look("access.tokens", partial(read_tokens, config.access.tokens))
    if config.http.tls is not None:
        look("http.tls", partial(check_certificate, config.http.tls))
    if config.http.direct_socket is not None:
        look("http.direct_socket", partial(_check_written, Path(config.http.direct_socket).parent))
    if config.http.direct_socket_group is not None:
        look("http.direct_socket_group", partial(group_id, config.http.direct_socket_group))
    if config.score_log is not None:
        look("score_log.folder", partial(_check_written, Path(config.score_log.folder), made=True))
    if config.models_state is not None:
        look("models_state", partial(_check_written, Path(config.models_state).parent))
        look("models_state", StateFile(config.models_state).read)
    return faults


def _check_bundle(config: DeploymentConfig, i: int) -> None:
    ref = config.models[i]
    if not (Path(ref.path) / MANIFEST_FILE).is_file():
        rule = f"the directory of a model bundle (no {MANIFEST_FILE} in it)"
        raise ConfigError(f"models.{i}.path: got {ref.path!r}, expected {rule}")
    check_below(config.models_root, ref.path, ref.tables, f"models.{i}.")
    placement = ref.tables and ref.tables.placement
    if placement and not (Path(placement) / PLACEMENT_FILE).is_file():
        rule = f"a directory that dpiframe plan wrote (no {PLACEMENT_FILE} in it)"
        raise ConfigError(f"models.{i}.tables.placement: got {placement!r}, expected {rule}")
    with named(Path(ref.path)):
        manifest = parse_manifest((Path(ref.path) / MANIFEST_FILE).read_bytes())
        check_listed(Path(ref.path), manifest.files)
    if placement:
        try:
            check_placement(placement, manifest.feature_schema)
        except BundleError as error:
            raise ConfigError(f"models.{i}.tables.placement: {error}") from None


def _check_written(folder: Path, *, made: bool = False) -> None:
    """made: whether the service makes the folder, and those above it, where they are not there."""
    there = next(p for p in (folder, *folder.parents) if p.exists()) if made else folder
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        got = "nothing there" if not there.exists() else "not to be written to" if there.is_dir() else "no folder"
        raise ConfigError(f"got {str(there)!r} ({got}), expected a folder that this user may write to")
