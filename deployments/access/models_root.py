"""`models_root`: a configuration names no bundle outside of one folder, and no link in a bundle leads out of it."""

from collections.abc import Iterator
from pathlib import Path

from deployments.config import DeploymentConfig
from dpiframe_core.errors import ConfigError


def check_models_root(config: DeploymentConfig) -> None:
    """Looks at every bundle, and at its tables' placement. It must run where they are read.

    Raises:
        ConfigError: one leads out of the folder.
    """
    if config.models_root is None:
        return
    root = Path(config.models_root).resolve()
    for i, ref in enumerate(config.models):
        for key, place in (("path", ref.path), ("tables.placement", ref.tables and ref.tables.placement)):
            for path in _with_links(Path(place)) if place else ():
                if not path.resolve().is_relative_to(root):
                    got = f"{str(path)!r}, which is {str(path.resolve())!r}"
                    raise ConfigError(f"models.{i}.{key}: got {got}, expected a place below models_root {str(root)!r}")


def _with_links(place: Path) -> Iterator[Path]:
    yield place
    yield from (path for path in place.rglob("*") if path.is_symlink())
