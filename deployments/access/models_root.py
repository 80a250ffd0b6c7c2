"""`models_root`: nobody names a bundle outside of one folder, and no link in a bundle leads out of it."""

from collections.abc import Iterator
from pathlib import Path

from deployments.config import DeploymentConfig
from deployments.config_tables import TablesHome
from dpiframe_core.errors import ConfigError


def check_models_root(config: DeploymentConfig) -> None:
    """Looks at every bundle, and at its tables' placement. It must run where they are read.

    Raises:
        ConfigError: one leads out of the folder.
    """
    for i, ref in enumerate(config.models):
        check_below(config.models_root, ref.path, ref.tables, f"models.{i}.")


def check_below(models_root: str | None, path: str, tables: TablesHome | None, before: str) -> None:
    """The same of one bundle, whose keys the message names behind `before`."""
    if models_root is None:
        return
    root = Path(models_root).resolve()
    for key, place in (("path", path), ("tables.placement", tables and tables.placement)):
        for each in _with_links(Path(place)) if place else ():
            if not each.resolve().is_relative_to(root):
                got = f"{str(each)!r}, which is {str(each.resolve())!r}"
                raise ConfigError(f"{before}{key}: got {got}, expected a place below models_root {str(root)!r}")


def _with_links(place: Path) -> Iterator[Path]:
    yield place
    yield from (path for path in place.rglob("*") if path.is_symlink())
