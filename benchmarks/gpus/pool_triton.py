"""Sums of the rows that a process holds of every bag, in Triton. Imported where there is a GPU alone."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def pool(  # type: ignore[no-untyped-def]
    ids, weight, out, bags, tables, held, begin,
    POOLING: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out[bag] = sum of weight[bag % tables, id - begin] over the bag's ids within [begin, begin + held).

    BLOCK bags a program, 16 bytes a load, all rows of a bag in flight.
    """
    bag = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column = tl.arange(0, DIM)
    real = bag < bags
    first = (bag % tables) * held
    total = tl.zeros([BLOCK, DIM], tl.float32)
    for i in tl.static_range(POOLING):
        row = tl.load(ids + bag * POOLING + i, mask=real, other=-1) - begin
        here = real & (row >= 0) & (row < held)
        at = ((first + row) * DIM)[:, None] + column[None, :]
        total += tl.load(weight + at, mask=here[:, None], other=0.0).to(tl.float32)
    tl.store(out + bag[:, None] * DIM + column[None, :], total.to(tl.float16), mask=real[:, None])
