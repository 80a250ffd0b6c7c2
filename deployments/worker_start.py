"""Imported first by each worker of a cluster (`RAY_preload_python_modules`), and by `dpiframe` before it starts one.

- It has no pandas from then on. Ray Serve and PyArrow import it wherever it is installed, for data frames, which no request
  holds: 0.4 s of CPU and 38 MB of each process. Neither needs it.
- It seldom looks for garbage among what it imports.
- It has room for its connections, and so has the HAProxy that one of them starts: see `make_room_for_descriptors`.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

from deployments.processes import gc_seldom, make_room_for_descriptors


class _WithoutPandas(MetaPathFinder):
    """Raises what an import does where pandas is not installed: of a None in sys.modules PyArrow would ask the version."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


gc_seldom()
sys.meta_path.insert(0, _WithoutPandas())
make_room_for_descriptors()
