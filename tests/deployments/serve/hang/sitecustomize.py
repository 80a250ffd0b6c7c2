"""For a service under test, by PYTHONPATH: its CPU lanes hang in the process whose id the file $DPIFRAME_TEST_HANG holds."""

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path

_LANE = "dpiframe_core.engine.cpu_lane"
_FILE = Path(os.environ.get("DPIFRAME_TEST_HANG", "/nowhere"))


class _HangingLane(importlib.abc.MetaPathFinder):
    """Finds the lane's module, and changes its class once it is loaded."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != _LANE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def load_and_change(module):  # type: ignore[no-untyped-def]
            load(module)
            run = module.CpuLane.run

            def hanging(*args, **kwargs):  # type: ignore[no-untyped-def]
                if _FILE.exists() and _FILE.read_text() == str(os.getpid()):
                    ctypes.CDLL(None).pause()
                return run(*args, **kwargs)

            module.CpuLane.run = hanging

        spec.loader.exec_module = load_and_change
        return spec


sys.meta_path.insert(0, _HangingLane())
