"""Every model in every form, and our engine of the same weights, compute their paper's formula: float64 oracles."""

import numpy as np
import pytest
import torch

from benchmarks.systems.names import MODEL_TITLES, PAPER_MODELS, WITH_CONTEXTS, cells_of
from benchmarks.systems.systems import storing
from benchmarks.workloads import dlrm as dlrm_workloads
from benchmarks.workloads.blocks import drawn_blocks
from benchmarks.workloads.compiled import MODULES
from benchmarks.workloads.inputs import PeerInputs
from benchmarks.workloads.lookups import Stacked, TablePerField, stacked
from benchmarks.workloads.models import MODELS, workload
from benchmarks.workloads.sequence import HISTORIES
from benchmarks.workloads.workload import SOURCE, Form, drawn_tables, schema_of
from dpiframe_core.bundle.bundle import Golden
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import GOLDEN_TOLERANCE, EngineOptions
from tests import model_oracle, oracle
from tests.benchmarks import module_oracle
from tests.benchmarks.tiny import BAGS, SIZES, make

CPU = torch.device("cpu")
FORMS = [SOURCE, Form(stacked=True, exact=True)]


def true_scores(w, block):
    """float64[rows, 1] by the paper's formula."""
    tables = {name: t.float().numpy() for name, t in w.tables.items()}
    if w.name in MODULES:
        module = w.module(SOURCE).dense
        embedded = np.stack(oracle.feature_values(w.schema, tables, block), 1)
        return oracle.sigmoid(module_oracle.LOGITS[w.name](module, embedded))
    dense = {name: t.numpy() for name, t in w.dense.items()}
    if w.name in PAPER_MODELS:
        return oracle.scores(w.schema, w.architecture, dense, tables, block)
    return model_oracle.scores(w.schema, w.architecture, dense, tables, block)


def blocks_of(w):
    """Batches as they are drawn, and one with lists that end early."""
    contexts = 3 if w.has_contexts else 1
    yield from drawn_blocks(w.schema, 7, 1, contexts=contexts, seed=1)
    yield from drawn_blocks(w.schema, 1, 1, seed=2)
    if w.has_contexts:
        yield from drawn_blocks(w.schema, 4, 1, seed=3)
        (block,) = drawn_blocks(w.schema, 6, 1, contexts=3, seed=4)
        ids = block.wide_ids("context_ids")
        for feature in HISTORIES:
            place = w.schema.columns[feature]
            for context, known in enumerate((1, 0, place.width - 1)):
                ids[context, place.start + known : place.start + place.width] = -1
        block.set_ids("context_ids", ids)
        yield block


@pytest.mark.parametrize("name", MODELS)
def test_every_form_and_the_engine_compute_the_papers_formula(name):
    w = make(name, CPU, seed=3)
    blocks = list(blocks_of(w))
    expected = [true_scores(w, b) for b in blocks]
    spread = np.concatenate(expected).std()
    assert spread > 1e-3, "scores that are all alike tell nothing"
    for form in FORMS:
        module = w.module(form)
        for block, scores in zip(blocks, expected, strict=True):
            with torch.inference_mode():
                found = module(*PeerInputs.of(w.schema, block.rows, block.contexts).tensors(block, CPU))
            assert found.dtype == torch.float32
            np.testing.assert_allclose(found.numpy(), scores, rtol=0, atol=GOLDEN_TOLERANCE["fp32"])
    engine = Engine(
        w.bundle(Golden(blocks[0], expected[0].astype(np.float32))), "cpu", "fp32", EngineOptions(max_batch_rows=64)
    )
    engine.warmup()
    for block, scores in zip(blocks, expected, strict=True):
        np.testing.assert_allclose(engine.submit(block), scores, rtol=0, atol=GOLDEN_TOLERANCE["fp32"])
    engine.close()


@pytest.mark.parametrize("name", MODELS)
def test_bf16_forms_stay_near_the_formula_and_give_float32_scores(name):
    w = make(name, CPU, seed=3)
    (block,) = drawn_blocks(w.schema, 16, 1, contexts=4 if w.has_contexts else 1)
    inputs = PeerInputs.of(w.schema, block.rows, block.contexts).tensors(block, CPU)
    for is_stacked in (False, True):
        with torch.inference_mode():
            found = w.module(Form(is_stacked, torch.bfloat16))(*inputs)
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found.numpy(), true_scores(w, block), rtol=0, atol=GOLDEN_TOLERANCE["bf16"])


@pytest.mark.parametrize("name", MODELS)
def test_a_stacked_form_is_one_graph_to_torch_compile_and_writes_where_it_is_told(name):
    w = make(name, CPU, seed=0)
    contexts = 2 if w.has_contexts else 1
    (block,) = drawn_blocks(w.schema, 8, 1, contexts=contexts)
    inputs = PeerInputs.of(w.schema, 8, contexts).tensors(block, CPU)
    module, out = w.module(Form(stacked=True)), torch.full((8, 1), torch.nan)
    torch._dynamo.reset()
    with torch.inference_mode():
        torch.compile(storing(module), fullgraph=True, backend="aot_eager")(out, *inputs)
        assert torch.equal(out, module(*inputs))


def test_models_have_titles_and_count_their_cells():
    assert list(MODEL_TITLES) == list(MODELS)
    assert {m for m in MODELS if make(m, CPU, seed=0).has_contexts} == set(WITH_CONTEXTS)
    assert cells_of("dlrm") == 5
    assert cells_of("din-50") == 1 + 4 * 3  # one row has one context


def test_mlperfs_shape_is_the_published_one():
    assert len(dlrm_workloads.MLPERF_SIZES) == len(dlrm_workloads.MLPERF_BAGS) == 26
    assert sum(dlrm_workloads.MLPERF_BAGS) == 214
    assert sum(dlrm_workloads.MLPERF_SIZES) * 128 * 2 < 60e9
    capped = workload("mlperf", CPU, most_rows=9)
    assert {t.rows for t in capped.schema.tables} == {3, 4, 9}
    assert capped.facts == {"largest_table_rows": 9, "table_bytes": (3 + 4 + 24 * 9) * 128 * 2}
    assert {t.dtype for t in capped.tables.values()} == {torch.float16}


def test_an_unknown_model_is_named():
    with pytest.raises(ValueError, match=r"^model: got 'dnc', expected one of wide_deep, deepfm, "):
        workload("dnc", CPU)


@pytest.mark.parametrize("bags", [None, BAGS])
def test_lookups_of_both_forms_give_the_rows(bags):
    tables = drawn_tables(schema_of(SIZES, 4), CPU, 0)
    ids = torch.cat([torch.randint(0, n, (6, bag)) for n, bag in zip(SIZES, bags or [1] * 5, strict=True)], 1).int()
    weights = list(tables.values())
    split = ids.split(list(bags or [1] * 5), 1)
    expected = torch.cat([t[own.long()].sum(1) for t, own in zip(weights, split, strict=True)], 1)
    for lookup in (TablePerField(weights, bags), Stacked(weights, bags)):
        torch.testing.assert_close(lookup(ids), expected)


@pytest.mark.parametrize("form", [TablePerField, Stacked])
def test_float16_rows_are_summed_in_float32_if_it_is_to_be_exact(form):
    tables = list(drawn_tables(schema_of(SIZES, 8, dtype="float16"), CPU, 0).values())
    ids = torch.cat([torch.randint(0, n, (6, bag)) for n, bag in zip(SIZES, BAGS, strict=True)], 1).int()
    split = zip(tables, ids.split(list(BAGS), 1), strict=True)
    expected = torch.cat([t.double()[own.long()].sum(1) for t, own in split], 1)
    found = form(tables, BAGS, exact=True)(ids)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    assert (form(tables, BAGS)(ids).double() - expected).abs().max() > 1e-6  # they come out as float16


def test_tables_that_lie_side_by_side_are_stacked_without_a_copy():
    tables = list(drawn_tables(schema_of(SIZES, 4), CPU, 0).values())
    whole = stacked(tables)
    assert whole.data_ptr() == tables[0].data_ptr()
    assert torch.equal(whole, torch.cat(tables))
    apart = [tables[1], tables[0]]
    assert stacked(apart).data_ptr() not in {t.data_ptr() for t in apart}
    assert torch.equal(stacked(apart), torch.cat(apart))
    narrow = list(drawn_tables(schema_of(SIZES, 1), CPU, 0).values())  # rows of 4 bytes: each table is aligned by itself
    assert torch.equal(stacked(narrow), torch.cat(narrow))


def test_inputs_are_packed_as_the_module_takes_them():
    w = make("din-50", CPU, seed=0)
    (block,) = drawn_blocks(w.schema, 5, 1, contexts=2)
    inputs = PeerInputs.of(w.schema, 5, 2)
    assert [p.name for p in inputs.parts] == ["candidate_ids", "context_ids", "request_of_row"]
    target, context, request = inputs.tensors(block, CPU)
    np.testing.assert_array_equal(target, block.wide_ids("candidate_ids"))
    np.testing.assert_array_equal(context, block.wide_ids("context_ids"))
    assert request.tolist() == [0, 0, 0, 1, 1]
    assert inputs.packed(block) is inputs.packed(block)
    assert [p.name for p in PeerInputs.of(w.schema, 5).parts] == ["candidate_ids", "context_ids"]
    numbers = make("dlrm", CPU, seed=0)
    assert [p.name for p in PeerInputs.of(numbers.schema, 5).parts] == ["candidate_ids", "candidate_dense"]
