"""Models of other libraries -> bundles: importers read files or a live module into a `SourceModel`, `write_import` writes it.

Nothing here is executed or unpickled, and no library is imported: what a checkpoint does not say comes from the user's files.
"""

from dpiframe_core.importers.deepctr import deepctr_torch, deepctr_torch_checkpoint
from dpiframe_core.importers.dlrm import facebook_dlrm, torchrec
from dpiframe_core.importers.fuxictr.files import find_files
from dpiframe_core.importers.fuxictr.run import fuxictr
from dpiframe_core.importers.rechub import torch_rechub
from dpiframe_core.importers.source import SourceModel
from dpiframe_core.importers.writing import Imported, write_import

__all__ = [
    "Imported",
    "SourceModel",
    "deepctr_torch",
    "deepctr_torch_checkpoint",
    "facebook_dlrm",
    "find_files",
    "fuxictr",
    "torch_rechub",
    "torchrec",
    "write_import",
]
