"""Dense layers and FM computed along with their lookup, against the float64 formulas over the embeddings of the reference."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels import reference
from kernels.cpu.dense import Linear
from kernels.cpu.first_layers import FirstLayers
from kernels.cpu.lookup import PackedLookup
from kernels.lookup.plan import ALWAYS_ROW_0, IdColumn, Kind, Slot, TableShape, rows_of
from kernels.runtime import c_build
from tests.kernels.lookup.test_lookup import batch_of, in_records, plan_of, some_padding, tables_of

F32 = torch.float32
EPS = 2.0**-23
pytestmark = [pytest.mark.bulk, pytest.mark.skipif(c_build.cpu_library() is None, reason="there is no C compiler")]


def plan_of_both_sides(dim, copies):
    """Ids and numbers of rows and contexts in turn, one column padded, and their first-order weights, whose numbers differ."""
    sources = [0, -1, ALWAYS_ROW_0, 1, ALWAYS_ROW_0, ALWAYS_ROW_0, -2]
    numbers = {2: 1, 4: -1, 5: -2}
    rows = [3, 200, 1, 70_000, 1, 1, 9]

    def columns(first):
        return [IdColumn(s, first + i, 0, s == 1) for i, s in enumerate(sources)]

    def slots(first, width, number_of):
        return [
            Slot(Kind.SCALE if i in numbers else Kind.GATHER, width, i * dim if width == dim else 0, first + i, 1,
                 **({"number": number_of[i]} if i in numbers else {}))
            for i in range(7)
        ]  # fmt: skip

    x = slots(0, dim, numbers) + [Slot(Kind.COPY, 1, 7 * dim + i, number=n) for i, n in enumerate((0, -1)[:copies])]
    tables = [TableShape(n, width, F32) for width in (dim, 1) for n in rows]
    total = [replace(s, out=0) for s in slots(7, 1, {2: 0, 4: -2, 5: 1})]
    return plan_of(tables, columns(0) + columns(7), x, total, context=2, candidate=2, context_numbers=2, candidate_numbers=2)


@pytest.mark.parametrize("dim", [1, 5, 8, 16, 40])
@pytest.mark.parametrize("copies", [0, 2])
@pytest.mark.parametrize("activation", ["relu", "identity", "gelu"])
@pytest.mark.parametrize(("rows", "contexts"), [(1, 1), (7, 1), (7, 3), (65, 16), (600, 1), (600, 60)])
def test_layers_and_fm_are_those_of_the_embeddings(rows, contexts, activation, copies, dim):
    plan = plan_of_both_sides(dim, copies)
    tables, batch = tables_of(plan), batch_of(plan, rows, contexts, ids=some_padding)
    x, total = (t.double() for t in reference.lookup(plan, tables, batch, rows))
    lookup, wants_fm = PackedLookup(plan, tables), copies == 0
    generator = torch.Generator().manual_seed(rows)
    weights = [torch.randn(out, plan.x_width, generator=generator) for out in (33, 16)]
    biases = [torch.randn(33, generator=generator), None]
    make = partial(Linear, activation=activation, dtype=F32)
    first = FirstLayers(lookup, [(w, b, make) for w, b in zip(weights, biases, strict=True)], wants_fm)
    held = rows_of(in_records(plan, batch), rows)
    outputs, got_total, fm = first(held.addresses)

    for y, weight, bias in zip(outputs, weights, biases, strict=True):
        added = torch.zeros(len(weight)).double() if bias is None else bias.double()
        want = reference.activate_(x @ weight.double().t() + added, activation)
        terms = x.abs() @ weight.double().abs().t() + added.abs()
        assert y.dtype == F32
        assert ((y.double() - want).abs() <= 8 * EPS * (terms + 1)).all()
    torch.testing.assert_close(got_total.double(), total, rtol=0, atol=64 * EPS)
    assert (fm is not None) == wants_fm
    if fm is not None:
        v = x.view(rows, 7, dim)
        pairs = sum(((v[:, i] * v[:, j]).sum(1) for i in range(7) for j in range(i)), torch.zeros(rows).double())
        magnitude = v.sum(1).square().sum(1) + v.square().sum((1, 2))
        assert ((fm[:, 0].double() - pairs).abs() <= 8 * EPS * (magnitude + 1)).all()
    again, *_ = first(held.addresses)
    assert all(torch.equal(a, b) for a, b in zip(again, outputs, strict=True))


@pytest.mark.parametrize(("rows", "contexts"), [(9, 1), (9, 9), (64, 4)])
def test_ids_outside_are_counted_as_the_lookup_alone_counts_them(rows, contexts):
    plan = plan_of_both_sides(16, 0)
    tables = tables_of(plan)
    batch = in_records(plan, batch_of(plan, rows, contexts, ids=lambda rng, n, size: rng.integers(0, 2 * size + 9, n)))
    alone, along = PackedLookup(plan, tables), PackedLookup(plan, tables)
    alone(batch, rows)
    first = FirstLayers(along, [(torch.ones(4, plan.x_width), None, partial(Linear, activation="relu", dtype=F32))], True)
    held = rows_of(batch, rows)
    first(held.addresses)
    assert alone.out_of_range == along.out_of_range > 0
