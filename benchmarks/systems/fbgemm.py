"""FBGEMM's table-batched embedding for inference, the strongest lookup that one can install. Imported on first use."""

from collections.abc import Sequence
from importlib.util import find_spec

import torch

_QUANTISE_ROWS = 1 << 20  # at a time: float32 copies of a whole table would not fit beside it


def require() -> None:
    """Raises ModuleNotFoundError if FBGEMM is not installed."""
    if find_spec("fbgemm_gpu") is None:
        raise ModuleNotFoundError(
            "fbgemm: got no module fbgemm_gpu, expected it on the path (FBGEMM 1.6 for torch 2.11) or no such system asked for"
        )


class TableBatch:
    """All tables in one TBE module, one feature a table, `bag` ids a feature, summed. Owns copies of the tables.

    Rows are 16-byte aligned, as its GPU kernels want them; a table of dim 1 becomes one of dim 4, which costs nothing more.
    Called with `indices(ids)`; gives out_dtype[rows, width] with table i at `columns[i]`.
    """

    def __init__(
        self, tables: Sequence[torch.Tensor], rows: int, out_dtype: torch.dtype, *, bag: int = 1, int8: bool = False
    ) -> None:
        require()
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen

        device = tables[0].device
        dims = [-(-t.shape[1] // 4) * 4 for t in tables]
        dims[-1] += -sum(dims) % 8  # so that rows of bfloat16 output stay 16-byte aligned for the GEMM that reads them
        self.columns = [sum(dims[:i]) for i in range(len(dims))]
        self.features, self.bag, self.rows = len(tables), bag, rows
        place = EmbeddingLocation.HOST if device.type == "cpu" else EmbeddingLocation.DEVICE
        kinds = [SparseType.INT8 if int8 else SparseType.from_dtype(t.dtype) for t in tables]
        specs = [(f"t{i}", t.shape[0], d, k, place) for i, (t, d, k) in enumerate(zip(tables, dims, kinds, strict=True))]
        self._module = IntNBitTableBatchedEmbeddingBagsCodegen(
            specs,
            device=device,
            output_dtype=SparseType.from_dtype(out_dtype),
            bounds_check_mode=BoundsCheckMode.NONE,  # the kernel alone; and the pruned build for offline hosts lacks that check
            row_alignment=16,
        )
        self._module.initialize_weights()
        for (stored, scale_bias), table in zip(self._module.split_embedding_weights(), tables, strict=True):
            if scale_bias is None:
                stored.view(table.dtype)[:, : table.shape[1]].copy_(table)
            else:
                _quantise(table, stored[:, : table.shape[1]], scale_bias)
        self._offsets = torch.arange(0, (len(tables) * rows + 1) * bag, bag, dtype=torch.int32, device=device)

    def indices(self, ids: torch.Tensor) -> torch.Tensor:
        """The ids int32[rows, features * bag] in the order that TBE reads: all rows of a feature, then the next. One kernel."""
        return ids.view(self.rows, self.features, self.bag).transpose(0, 1).reshape(-1)

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        return self._module(indices, self._offsets)


def _quantise(table: torch.Tensor, stored: torch.Tensor, scale_bias: torch.Tensor) -> None:
    """Row-wise uint8 with float16 scale and bias, as TBE stores it."""
    for start in range(0, table.shape[0], _QUANTISE_ROWS):
        part = table[start : start + _QUANTISE_ROWS].float()
        low, high = part.amin(1, keepdim=True), part.amax(1, keepdim=True)
        scale, bias = ((high - low) / 255).half(), low.half()
        codes = ((part - bias.float()) / scale.float().clamp(min=1e-8)).round_().clamp_(0, 255)
        stored[start : start + len(part)].copy_(codes)
        scale_bias[start : start + len(part)].copy_(torch.cat([scale, bias], 1).view(torch.uint8))
