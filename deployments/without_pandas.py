"""Imported first by each worker of a private cluster (`RAY_preload_python_modules`): it has no pandas from then on.

Ray Serve and PyArrow import pandas wherever it is installed, for data frames, which no request holds: 0.4 s of CPU and 38 MB
of each process. Neither needs it.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


class _WithoutPandas(MetaPathFinder):
    """Raises what an import does where pandas is not installed: of a None in sys.modules PyArrow would ask the version."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


sys.meta_path.insert(0, _WithoutPandas())
