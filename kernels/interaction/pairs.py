"""What DLRM's dots are of, where the tensor cores make them (row_dots.cuh)."""

from dataclasses import dataclass

from kernels.dense.linear import DENSE_DTYPE

_MOST_REGISTERS = 64  # of a lane, for a row's vectors


@dataclass(frozen=True, slots=True)
class Pairs:
    """The dots of `fields` vectors of `dim` columns, the first of which a layer makes; `keep` of its columns in front."""

    fields: int
    dim: int
    keep: int
    diagonal: bool

    @property
    def columns(self) -> int:
        return self.keep + self.fields * (self.fields + (1 if self.diagonal else -1)) // 2

    def fits(self, precision: str) -> bool:
        """Whether a warp has room for them, and tensor cores are to multiply them."""
        if precision not in ("tf32", "bf16") or self.fields < 2 or self.keep > self.dim:
            return False
        size = DENSE_DTYPE[precision].itemsize
        registers = -(-self.fields // 8) * -(-self.dim * size // 64) * 4
        return self.dim * size % 16 == 0 and registers <= _MOST_REGISTERS
