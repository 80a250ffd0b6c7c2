"""A module's tensors while it is compiled: strided windows on values of the graph, told apart by where the batch lies in them.

Every view of torch's (reshape, transpose, select, split ..) is arithmetic here and costs nothing at run time. Plain Python.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from dpiframe_core.graph.aten import contiguous
from dpiframe_core.graph.aten_rules import Shape


class Refused(ValueError):
    """What cannot be taken over; the text is `got .., expected ..`. The caller adds the node and its source line."""


@dataclass(frozen=True, slots=True)
class Size:
    """A dimension's size: `count`, times the rows of the batch if `batch`."""

    count: int
    batch: bool = False


class Atom(NamedTuple):
    """A run of equally spaced elements of a row; or the batch itself, which has neither size nor stride."""

    size: int
    stride: int
    batch: bool = False


BATCH = Atom(1, 0, True)
Dim = tuple[Atom, ...]  # row-major; () is a dimension of size 1


@dataclass(frozen=True, slots=True)
class Strided:
    """A tensor: which elements of each row of the graph's value `base` it shows, in which order.

    boolean: it holds truth values (0 and 1), which `where` and comparisons give.
    """

    base: str
    dims: tuple[Dim, ...]
    offset: int = 0
    boolean: bool = False

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def batch_dim(self) -> int:
        (found,) = (i for i, dim in enumerate(self.dims) if BATCH in dim)
        return found

    @property
    def atoms(self) -> list[Atom]:
        """Of a row, in the tensor's order."""
        return [a for dim in self.dims for a in dim if not a.batch]

    @property
    def is_run(self) -> bool:
        """Whether a row of it is one run of neighbouring elements, in order."""
        run = merged(self.atoms)
        return not run or (len(run) == 1 and run[0].stride == 1)

    def size(self, dim: int) -> int:
        """Of a dimension, the rows of the batch not counted."""
        return prod(a.size for a in self.dims[dim])

    @property
    def sizes(self) -> list[Size]:
        return [Size(self.size(i), BATCH in dim) for i, dim in enumerate(self.dims)]

    @property
    def count(self) -> int:
        """Elements of a row."""
        return prod(a.size for a in self.atoms)


def fresh(base: str, sizes: Sequence[Size], boolean: bool = False) -> Strided:
    """The whole of a value, row-major, under sizes of which one has the batch (in front of the rest of its dimension)."""
    strides = contiguous(tuple(s.count for s in sizes))
    dims = tuple(
        ((BATCH,) if s.batch else ()) + ((Atom(s.count, stride),) if s.count > 1 else ())
        for s, stride in zip(sizes, strides, strict=True)
    )
    return Strided(base, dims, 0, boolean)


def permuted(t: Strided, order: Sequence[int]) -> Strided:
    return replace(t, dims=tuple(t.dims[i] for i in order))


def unsqueezed(t: Strided, at: int) -> Strided:
    return replace(t, dims=(*t.dims[:at], (), *t.dims[at:]))


def squeezed(t: Strided, at: Sequence[int]) -> Strided:
    return replace(t, dims=tuple(d for i, d in enumerate(t.dims) if i not in at or d))


def expanded(t: Strided, sizes: Sequence[Size]) -> Strided:
    dims: list[Dim] = [()] * (len(sizes) - t.rank) + list(t.dims)
    for i, size in enumerate(sizes):
        if size.batch and BATCH not in dims[i]:
            raise Refused("got an expansion by the rows of the batch, expected each row to be computed from itself")
        if not dims[i] and size.count > 1:
            dims[i] = (Atom(size.count, 0),)
    return replace(t, dims=tuple(dims))


def selected(t: Strided, at: int, index: int) -> Strided:
    """t[.., index, ..], without the dimension."""
    dim, offset = _row_dim(t, at, "a choice"), t.offset
    for atom in reversed(dim):
        index, digit = divmod(index, atom.size)
        offset += digit * atom.stride
    return replace(t, dims=t.dims[:at] + t.dims[at + 1 :], offset=offset)


def sliced(t: Strided, at: int, start: int, size: int, step: int = 1) -> Strided | None:
    """t[.., start : .. : step, ..] with `size` elements; None if the dimension must be copied first."""
    dim = merged(_row_dim(t, at, "a slice"))
    if size < 1:
        raise Refused("got a slice of nothing, expected at least one element")
    if len(dim) > 1:
        return None
    stride = dim[0].stride if dim else 0
    cut: Dim = (Atom(size, stride * step),) if size > 1 else ()
    return replace(t, dims=(*t.dims[:at], cut, *t.dims[at + 1 :]), offset=t.offset + start * stride)


def viewed(t: Strided, sizes: Sequence[Size]) -> Strided | None:
    """The same elements in the same order under other sizes; None if they must be copied first."""
    waiting = merged([a for dim in t.dims for a in dim])
    dims: list[Dim] = []
    for size in sizes:
        need, batch, dim = size.count, size.batch, list[Atom]()
        while need > 1 or batch:
            if not waiting:
                return None
            atom = waiting.pop(0)
            if atom.batch:
                if not batch:
                    raise Refused("got a view that cuts the batch, expected each row to be computed from itself")
                batch = False
            elif need % atom.size == 0:
                need //= atom.size
            elif atom.size % need == 0:
                inner = atom.size // need
                waiting.insert(0, Atom(inner, atom.stride))
                atom, need = Atom(need, atom.stride * inner), 1
            else:
                return None
            dim.append(atom)
        dims.append(tuple(dim))
    return replace(t, dims=tuple(dims)) if not waiting else None


def _row_dim(t: Strided, at: int, what: str) -> Dim:
    if BATCH in t.dims[at]:
        raise Refused(f"got {what} among the rows of the batch, expected each row to be computed from itself")
    return t.dims[at]


def merged(atoms: Sequence[Atom]) -> list[Atom]:
    """Neighbours joined where the outer one continues the inner one."""
    out: list[Atom] = []
    for atom in atoms:
        last = out[-1] if out else BATCH
        if not atom.batch and not last.batch and last.stride == atom.size * atom.stride:
            out[-1] = Atom(last.size * atom.size, atom.stride)
        else:
            out.append(atom)
    return out


@dataclass(frozen=True, slots=True)
class Frame:
    """How tensors of rank `rank` with the batch in dimension `at` become ones with the batch in front.

    Dimension `at` may be the batch merged with `outer` and `inner` others (attention's heads): those become dimensions.
    """

    rank: int
    at: int
    outer: int = 1
    inner: int = 1

    def position(self, dim: int) -> int:
        """Where a dimension other than the batch's lies, the batch counted as 0."""
        if dim == self.at:
            raise Refused("got an operation along the batch, expected each row to be computed from itself")
        return dim + 1 if dim < self.at else dim + (self.outer > 1) + (self.inner > 1)

    def row(self, t: Strided) -> tuple[Shape, Shape] | None:
        """Sizes and strides of a tensor's rows; None if it must be copied first (a dimension is no even run)."""
        sizes, strides = list[int](), list[int]()
        dims: list[Dim] = [()] * (self.rank - t.rank) + list(t.dims)
        for i, dim in enumerate(dims):
            parts = [(1, dim)]
            if i == self.at:
                where = dim.index(BATCH)
                parts = [(self.outer, dim[:where]), (self.inner, dim[where + 1 :])]
                parts = [(wanted, d) for wanted, d in parts if wanted > 1]
            for _, d in parts:
                atoms = merged(d)
                if len(atoms) > 1:
                    return None
                sizes.append(atoms[0].size if atoms else 1)
                strides.append(atoms[0].stride if atoms else 0)
        return tuple(sizes), tuple(strides)

    def back(self, base: str, sizes: Shape, boolean: bool = False) -> Strided:
        """A fresh value of such rows as a tensor of rank `rank` again."""
        atoms = [(Atom(n, s),) if n > 1 else () for n, s in zip(sizes, contiguous(sizes), strict=True)]
        dims: list[Dim] = []
        for i in range(self.rank):
            if i != self.at:
                dims.append(atoms.pop(0))
                continue
            outer = atoms.pop(0) if self.outer > 1 else ()
            inner = atoms.pop(0) if self.inner > 1 else ()
            dims.append((*outer, BATCH, *inner))
        return Strided(base, tuple(dims), 0, boolean)


def frame_of(tensors: Sequence[Strided], rank: int) -> Frame:
    """The frame that all of them fit, for an operation that lines their dimensions up from the last one on.

    Raises:
        Refused: the batch lies elsewhere in one than in another, so that rows would meet.
    """
    frames = set()
    for t in tensors:
        dim = t.dims[t.batch_dim]
        where = dim.index(BATCH)
        outer, inner = prod(a.size for a in dim[:where]), prod(a.size for a in dim[where + 1 :])
        frames.add(Frame(rank, t.batch_dim + rank - t.rank, outer, inner))
    if len(frames) != 1:
        raise Refused("got operands with the batch in different dimensions, expected each row to be computed from itself")
    return frames.pop()
