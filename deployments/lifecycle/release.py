"""A release: one version of a model, as all replicas load it. Reads no more of a bundle than its manifest."""

import hashlib
from pathlib import Path
from typing import Self

from deployments.config_models import ModelRef
from deployments.config_tables import TablesHome
from dpiframe_core.bundle.encoding_files import named
from dpiframe_core.bundle.manifest import MANIFEST_FILE, Manifest, parse_manifest
from dpiframe_core.errors import BundleError
from dpiframe_core.strict import Name, Strict, Version

Key = tuple[str, str]  # model, version


class Release(Strict):
    """The bundle at `path`, absolute, under a model's name and a version.

    `fingerprint`: of the bundle. A replica that finds another one in the directory does not serve it.
    """

    model: Name
    version: Version
    path: str
    fingerprint: str
    tables: TablesHome | None = None

    @property
    def key(self) -> Key:
        return self.model, self.version

    @property
    def label(self) -> str:
        """By which both ends of the fan-in know it. A name has no slash."""
        return f"{self.model}/{self.version}"

    @classmethod
    def of(cls, ref: ModelRef) -> Self:
        """What a configuration names.

        Raises:
            BundleError: there is no sound manifest.
        """
        manifest, text = _manifest(Path(ref.path))
        return cls(
            model=ref.name or manifest.name,
            version=ref.version or manifest.version,
            path=ref.path,
            fingerprint=hashlib.sha256(text).hexdigest(),
            tables=ref.tables,
        )

    def features(self) -> list[str]:
        """The names, as the bundle that lies there has them. Raises as `of`."""
        return [feature.name for feature in _manifest(Path(self.path))[0].feature_schema.features]

    def check_fingerprint(self, found: str) -> None:
        """Raises BundleError if the directory holds another bundle by now."""
        if found != self.fingerprint:
            got = f"got a bundle with fingerprint {found[:16]}, expected {self.fingerprint[:16]}"
            raise BundleError(f"{self.path}: {got}, which was there when version {self.version} was asked for")


def _manifest(root: Path) -> tuple[Manifest, bytes]:
    with named(root):
        try:
            text = (root / MANIFEST_FILE).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise BundleError(f"{MANIFEST_FILE}: got no such file, expected one in every bundle") from None
        return parse_manifest(text), text
