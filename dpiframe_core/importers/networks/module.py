"""A model's function as a module that `compile` takes: its parameters under the checkpoint's names, in a tree."""

from collections.abc import Mapping, Sequence
from keyword import iskeyword

import numpy as np
import torch
from torch import Tensor, nn

from dpiframe_core.errors import InputError, listed
from dpiframe_core.importers.networks.net import Embedded, Logit, Net, table_of


class NetModule(nn.Module):
    """Logits of a batch, float32[n, tasks], of a dict of features: ids, padded where they are lists, and numbers."""

    def __init__(
        self, logit: Logit, weights: Mapping[str, Tensor], checkpoint: str, settings: Mapping[str, object], where: str,
        features: Sequence[Embedded],
    ) -> None:  # fmt: skip
        """`checkpoint`, `where` name the files of weights and settings, for errors."""
        super().__init__()
        self._logit, self._settings, self._where, self._features = logit, settings, where, tuple(features)
        self._checkpoint = checkpoint
        self.weights = _Branch()
        # Whole numbers are counters and index lists of the library's, which no function reads.
        self._names = tuple(name for name, value in weights.items() if value.is_floating_point())
        # torch writes an attribute's path as code, which a feature called "class" would break.
        self._paths = {name: ".".join(f"{p}_" if iskeyword(p) else p for p in name.split(".")) for name in self._names}
        for name, path in self._paths.items():
            self.weights.hang(path.split("."), weights[name])
        self._read: set[str] = set()
        self.skipped: set[str] = set()
        self.features_read: set[str] = set()
        self.first_order_read: set[str] = set()
        self.defaults: dict[str, object] = {}

    def forward(self, values: Mapping[str, Tensor]) -> Tensor:
        held = {name: self.weights.get_buffer(path) for name, path in self._paths.items()}
        net = Net(held, self._checkpoint, self._settings, self._where, self._features, values)
        self.defaults = net.defaults  # also of a call that fails
        logit = self._logit(net)
        self._read |= net.read
        self.skipped |= net.skipped
        self.features_read |= net.features_read
        self.first_order_read |= net.first_order_read
        return logit

    def exact(self, ids: Tensor) -> "NetModule":
        """The same in float64, for rows that read these ids, int64[*]: of a table it has those rows alone."""
        tables = {f.name for f in self._features if f.kind != "numeric"}
        held = {name: self.weights.get_buffer(path) for name, path in self._paths.items()}
        doubled = {name: _doubled(w, ids) if table_of(name) in tables else w.double() for name, w in held.items()}
        return NetModule(self._logit, doubled, self._checkpoint, self._settings, self._where, self._features)

    def check_read(self, model: str) -> None:
        """After a call: every parameter was read or skipped.

        Raises:
            InputError: some were not; with their names.
        """
        left = [name for name in self._names if name not in self._read | self.skipped]
        if left:
            expected = f"a place in {model} with these settings for {listed(left)}"
            raise InputError(self._checkpoint, f"{len(left)} parameters left over", expected)


def _doubled(table: Tensor, ids: Tensor) -> Tensor:
    rows, out = ids[ids < len(table)], torch.from_numpy(np.zeros(tuple(table.shape)))  # what nobody writes takes no memory
    out[rows] = table[rows].double()
    return out


class _Branch(nn.Module):
    """A level of the tree of names."""

    def hang(self, path: Sequence[str], value: Tensor) -> None:
        first, *rest = path
        if not rest:
            self.register_buffer(first, value)
            return
        if first not in self._modules:
            self.add_module(first, _Branch())
        branch = self._modules[first]
        assert isinstance(branch, _Branch)
        branch.hang(rest, value)
