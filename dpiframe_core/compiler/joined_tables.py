"""The tables of a compiled module, by name: of those whose columns lie in several weights no copy is kept."""

from collections.abc import Iterator, Mapping, Sequence

import torch


class JoinedTables(Mapping[str, torch.Tensor]):
    """float32[rows, dim] of each, joined when it is asked for: many such tables need the memory of one at a time."""

    def __init__(self, columns: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self._columns = columns

    def __getitem__(self, name: str) -> torch.Tensor:
        parts = self._columns[name]
        return (parts[0] if len(parts) == 1 else torch.cat([*parts], 1)).float().contiguous()

    def __contains__(self, name: object) -> bool:  # Mapping's own would join it
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)
