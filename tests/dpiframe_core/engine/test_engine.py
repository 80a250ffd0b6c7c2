"""The engine through its public calls, on both backends: threads, deadlines, priorities, oversize, golden rows, lifetime."""

import threading
import time
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from dpiframe_core.bundle.bundle import Golden
from dpiframe_core.engine import options
from dpiframe_core.engine.engine import Engine
from dpiframe_core.engine.options import EngineOptions
from dpiframe_core.errors import BundleError, ConfigError, DeadlineExceeded, InputError, Unavailable
from dpiframe_core.graph.architecture import DCNv2, DeepFM
from dpiframe_core.operators import cpu
from tests import oracle
from tests.backends import BACKENDS
from tests.runner import small_bundle

ARCHITECTURE = DeepFM(hidden_units=(16, 8))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return small_bundle(tmp_path_factory.mktemp("bundles") / "small", ARCHITECTURE)


def started(bundle, device, **changed):
    engine = Engine(bundle, device, "fp32", EngineOptions(**{"max_batch_rows": 64, **changed}))
    engine.warmup()
    return engine


def off_by(bundle, error):
    """A bundle whose golden scores are by so much higher than they should be."""
    return replace(bundle, golden=Golden(bundle.golden.block, bundle.golden.scores + np.float32(error)))


def block_of(bundle, rows, seed=0, contexts=1):
    return oracle.make_block(bundle.manifest.feature_schema, rows, contexts, np.random.default_rng(seed))


def raw_request(n):
    """Raw values for every feature of `oracle.make_schema`: (candidates, context)."""
    candidates = {f"c{i}": [(i + j) % 3 for j in range(n)] for i in (2, 3, 4)}
    candidates |= {"bag0": [["x", "y"], []] * (n // 2) + [["z"]] * (n % 2), "n0": [0.5 * j for j in range(n)]}
    return candidates, {"c0": 1, "c1": None, "n1": -1.5}


@pytest.mark.parametrize("device", BACKENDS)
def test_load_verifies_warms_up_and_scores_raw_values(bundle, device):
    engine = Engine.load(bundle.path, device, "fp32", max_batch_rows=64)
    report = engine.warmup()
    assert report.golden_error <= 1e-5
    candidates, context = raw_request(5)
    got = engine.score(candidates, context)
    assert got.shape == (5, 1)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, engine.submit(engine.encoder.encode(candidates, context)))
    engine.close()


@pytest.mark.parametrize("device", BACKENDS)
def test_a_request_larger_than_a_batch_is_split_and_joined_in_order(bundle, device):
    engine = started(bundle, device)
    block = block_of(bundle, 201, contexts=11)
    whole = engine.submit(block)
    rows = np.concatenate([engine.submit(block.part(i, i + 1)) for i in range(201)])
    np.testing.assert_allclose(whole, rows, rtol=0, atol=1e-6)
    engine.close()


@pytest.mark.parametrize("device", BACKENDS)
def test_the_same_batch_gives_the_same_bits_every_time(bundle, device):
    engine = started(bundle, device)
    block = block_of(bundle, 40)
    first = engine.submit(block)
    for _ in range(20):
        assert np.array_equal(engine.submit(block), first)
    engine.close()


@pytest.mark.parametrize("device", BACKENDS)
def test_many_threads_get_their_own_scores(bundle, device):
    engine = started(bundle, device, lanes=2)
    blocks = [block_of(bundle, 1 + i % 17, seed=i) for i in range(24)]
    want = [engine.submit(b) for b in blocks]
    wrong = []

    def client(start):
        for i in range(start, start + 60):
            got = engine.submit(blocks[i % 24])
            if not np.allclose(got, want[i % 24], rtol=0, atol=1e-6):
                wrong.append(i)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    engine.close()


def test_a_passed_deadline_is_refused_and_nothing_runs(bundle):
    engine = started(bundle, "cpu")
    with pytest.raises(DeadlineExceeded, match="got no free lane before the deadline"):
        engine.submit(block_of(bundle, 3), deadline=time.monotonic() - 1)
    assert engine.submit(block_of(bundle, 3)).shape == (3, 1)
    engine.close()


def test_a_waiting_caller_of_higher_priority_gets_the_lane_first(bundle):
    engine = started(bundle, "cpu", lanes=1)
    order = []

    def caller(priority):
        lane = engine._pool.take(None, priority)
        order.append(priority)  # while it has the only lane, so that nobody overtakes it here
        engine._pool.put(lane)

    lane = engine._pool.take(None, 0)
    threads = []
    for priority in (0, 5, 1):
        threads.append(threading.Thread(target=caller, args=(priority,)))
        threads[-1].start()
        while len(engine._pool._waiting) < len(threads):
            time.sleep(0.001)
    engine._pool.put(lane)
    for t in threads:
        t.join()
    assert order == [5, 1, 0]
    engine.close()


def test_an_engine_serves_only_between_warmup_and_close(bundle):
    engine = Engine(bundle, "cpu")
    with pytest.raises(Unavailable, match="engine: not warmed up"):
        engine.submit(block_of(bundle, 1))
    engine.warmup()
    engine.submit(block_of(bundle, 1))
    engine.close()
    engine.close()
    with pytest.raises(Unavailable, match="engine: closed"):
        engine.submit(block_of(bundle, 1))


@pytest.mark.parametrize("device", BACKENDS)
def test_the_sizes_of_batches_that_were_scored_are_counted(bundle, device):
    engine = started(bundle, device, buckets=(8, 64))
    assert engine.batch_sizes.sum() == 0  # golden rows are no batches
    assert engine.padding_waste == 0
    with pytest.raises(InputError):
        engine.run_batch([])
    for rows in (3, 3, 64, 201):  # the last as 64, 64, 64 and 9
        engine.submit(block_of(bundle, rows))
    got = engine.batch_sizes
    assert {int(rows): int(got[rows]) for rows in np.flatnonzero(got)} == {3: 2, 9: 1, 64: 4}
    got[:] = 0
    assert engine.batch_sizes.sum() == 7
    # On a CPU a batch runs at its own size; here 3 -> 8 twice and 9 -> 64.
    assert engine.padding_waste == (0 if device == "cpu" else pytest.approx((5 + 5 + 55) / (8 + 8 + 64 + 4 * 64)))
    engine.close()


def test_batches_of_several_threads_are_all_counted(bundle):
    engine = started(bundle, "cpu", lanes=2)
    threads = [threading.Thread(target=lambda: [engine.submit(block_of(bundle, 2)) for _ in range(100)]) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert engine.batch_sizes[2] == 400
    engine.close()


@pytest.mark.parametrize("device", BACKENDS)
def test_batches_of_no_rows_or_too_many_are_refused(bundle, device):
    engine = started(bundle, device)
    with pytest.raises(InputError, match="batch rows: got 65, expected 1 to 64"):
        engine.run_batch([block_of(bundle, 33), block_of(bundle, 32)])
    with pytest.raises(InputError, match="batch rows: got 0, expected 1 to 64"):
        engine.run_batch([])
    with pytest.raises(InputError, match="batch contexts: got 65, expected at most 64"):
        engine.run_batch([block_of(bundle, 2, contexts=65)])
    engine.close()


@pytest.mark.parametrize("device", BACKENDS)
def test_golden_rows_that_do_not_come_out_stop_the_start(bundle, device):
    engine = Engine(off_by(bundle, 0.01), device, "fp32", EngineOptions(max_batch_rows=64))
    with pytest.raises(BundleError, match=r"golden rows: got scores off by 0\.01 at fp32"):
        engine.warmup()
    with pytest.raises(Unavailable, match="golden rows"):
        engine.submit(block_of(bundle, 1))


def test_a_default_precision_that_misses_the_golden_rows_gives_way_to_fp32(bundle, monkeypatch):
    monkeypatch.setitem(options.DEFAULT_PRECISION, "cpu", "bf16")
    monkeypatch.setitem(options.FALLBACK, "bf16", "fp32")
    monkeypatch.setitem(options.GOLDEN_TOLERANCE, "bf16", 1e-9)
    engine = Engine(bundle, "cpu", None, EngineOptions(max_batch_rows=64))
    report = engine.warmup()
    assert (engine.precision, report.precision, report.golden_tolerance) == ("fp32", "fp32", 1e-5)
    assert engine.submit(block_of(bundle, 3)).shape == (3, 1)
    asked = Engine(bundle, "cpu", "bf16", EngineOptions(max_batch_rows=64))
    with pytest.raises(BundleError, match="at bf16 on cpu, expected at most 1e-09; use a higher precision"):
        asked.warmup()


@pytest.mark.gpu
@pytest.mark.parametrize(("error", "served"), [(0.0, "tf32"), (0.6e-3, "fp32")])
def test_a_gpu_serves_tf32_unless_the_golden_rows_are_near_its_tolerance(bundle, error, served, caplog):
    golden = bundle.manifest.golden.model_copy(update={"tolerance": {"fp32": 2e-3}})
    tolerant = replace(off_by(bundle, error), manifest=bundle.manifest.model_copy(update={"golden": golden}))
    engine = Engine(tolerant, "cuda:0", None, EngineOptions(max_batch_rows=64))
    assert engine.warmup().precision == engine.precision == served
    assert ("serving at fp32" in caplog.text) == (served == "fp32")
    assert engine.submit(block_of(bundle, 3)).shape == (3, 1)
    engine.close()


@pytest.mark.parametrize("change", ["missing", "left over", "shape"])
def test_parameters_that_differ_from_the_architecture_are_named(bundle, change):
    dense = dict(bundle.dense)
    if change == "missing":
        del dense["deep.1.bias"]
    elif change == "left over":
        dense["deep.9.bias"] = torch.zeros(3)
    else:
        dense["deep.1.bias"] = torch.zeros(9)
    expected = {"missing": r"deep.1.bias: got none, expected \(8,\)", "left over": r"deep.9.bias: got \(3,\), expected none",
                "shape": r"deep.1.bias: got \(9,\), expected \(8,\)"}[change]  # fmt: skip
    with pytest.raises(BundleError, match=expected):
        Engine(replace(bundle, dense=dense), "cpu")


def test_an_architecture_that_the_schema_cannot_feed_is_refused(bundle):
    schema = oracle.make_schema(first_order=False)
    manifest = bundle.manifest.model_copy(update={"feature_schema": schema})
    with pytest.raises(BundleError, match="architecture deepfm: features: got none with a first_order_table"):
        Engine(replace(bundle, manifest=manifest), "cpu")
    manifest = bundle.manifest.model_copy(update={"architecture": DCNv2(cross_layers=1, hidden_units=(4,))})
    with pytest.raises(BundleError, match=r"dense\.safetensors: cross\.0\.bias: got none"):
        Engine(replace(bundle, manifest=manifest), "cpu")


@pytest.mark.parametrize(
    ("device", "precision", "message"),
    [
        ("cpu", "tf32", "precision: got 'tf32', expected one of fp32, bf16 on cpu"),
        ("tpu", None, "device: got 'tpu', expected auto, cpu, cuda or cuda:N"),
        ("cuda:99", None, "device: got 'cuda:99', expected one of the"),
    ],
)
def test_a_device_or_precision_that_does_not_exist_is_refused(bundle, device, precision, message):
    with pytest.raises(InputError, match=message):
        Engine(bundle, device, precision)


def test_bf16_is_refused_on_a_processor_that_only_emulates_it(bundle, monkeypatch):
    monkeypatch.setattr(cpu, "has_bf16", lambda: False)
    message = "precision: got 'bf16', expected fp32 on this processor, which has neither AVX512-BF16 nor AMX"
    with pytest.raises(InputError, match=message):
        Engine(bundle, "cpu", "bf16")


@pytest.mark.skipif(not cpu.has_bf16(), reason="this processor only emulates bfloat16")
def test_bf16_on_a_cpu_meets_the_golden_rows(bundle):
    engine = Engine(bundle, "cpu", "bf16")
    assert engine.warmup().golden_tolerance == 1e-2
    assert engine.submit(block_of(bundle, 3)).dtype == np.float32
    engine.close()


def test_a_bundle_that_asks_for_tf32_runs_in_fp32_on_a_cpu(bundle):
    asks = bundle.manifest.model_copy(update={"precision": bundle.manifest.precision.model_copy(update={"dense": "tf32"})})
    assert Engine(replace(bundle, manifest=asks), "cpu").precision == "fp32"


@pytest.mark.parametrize("device", BACKENDS)
def test_close_under_load_serves_whole_answers_or_refuses(bundle, device):
    engine = started(bundle, device)
    block, outcomes, stop = block_of(bundle, 7), set(), threading.Event()
    want = engine.submit(block)

    def client():
        while not stop.is_set():
            try:
                outcomes.add("right" if np.allclose(engine.submit(block), want, rtol=0, atol=1e-6) else "wrong")
            except Unavailable:
                outcomes.add("refused")
                return

    threads = [threading.Thread(target=client) for _ in range(6)]
    for t in threads:
        t.start()
    while not outcomes:
        time.sleep(0.001)
    closers = [threading.Thread(target=engine.close) for _ in range(2)]
    for t in closers:
        t.start()
    for t in closers:
        t.join(60)
    stop.set()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in [*threads, *closers])
    assert outcomes == {"right", "refused"}


def test_an_engine_warms_up_once(bundle):
    engine = started(bundle, "cpu")
    with pytest.raises(Unavailable, match="got a warm-up while serving"):
        engine.warmup()
    engine.close()
    with pytest.raises(Unavailable, match="got a warm-up while closed"):
        engine.warmup()


def test_a_block_of_another_model_or_with_rows_of_no_context_is_refused(bundle):
    engine = started(bundle, "cpu")
    other = oracle.make_block(oracle.make_schema(one_hot=3), 2, 1, np.random.default_rng(0))
    with pytest.raises(InputError, match="row block layout: got BlockLayout"):
        engine.submit(other)
    for bad in (-1, 3):
        block = block_of(bundle, 5, contexts=3)
        block.request_of_row[2] = bad
        with pytest.raises(InputError, match=r"row block request_of_row: got .*, expected within \[0, 3\)"):
            engine.submit(block)
    engine.close()


def test_an_oversized_block_whose_rows_jump_between_contexts_is_scored(bundle):
    engine = started(bundle, "cpu")
    block = block_of(bundle, 201, contexts=201)
    block.request_of_row[:] = np.random.default_rng(1).permutation(201)
    rows = np.concatenate([engine.submit(block.part(i, i + 1)) for i in range(201)])
    np.testing.assert_allclose(engine.submit(block), rows, rtol=0, atol=1e-6)
    engine.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_rows": 0}, "max_batch_rows: got 0, expected 1 to 65536"),
        ({"lanes": 0}, "lanes: got 0, expected at least 1"),
        ({"buckets": (1, 16)}, r"buckets: got \(1, 16\), expected sizes from 1 up to max_batch_rows 4096"),
        ({"policy": "bfs"}, "policy: got 'bfs', expected one of auto, waves, regions, breadth_first, depth_first, sequential"),
    ],
)
def test_options_that_make_no_engine_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineOptions(**options)


@pytest.mark.gpu
def test_lanes_and_tuning_share_no_stream(bundle):
    """Torch keeps a cuBLAS workspace a stream, and its own streams come from a pool of 32."""
    engines = [started(bundle, "cuda:0", lanes=2) for _ in range(2)]
    own = [s.cuda_stream for e in engines for lane in e._pool.lanes for s in lane._streams]
    pooled = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    assert len(set(own)) == len(own)
    assert not pooled & set(own)
    for e in engines:
        e.close()


@pytest.mark.gpu
def test_strict_fp32_is_not_silently_tf32(bundle):
    """A product whose exact value tf32 cannot hold: 1 + 2^-12 has 12 fraction bits, tf32 keeps 10."""
    from kernels.dense.linear import Linear, matmul_precision

    value = 1 + 2.0**-12
    layer = Linear(torch.full((64, 64), value), None, "identity", torch.float32, torch.device("cuda", 0))
    x = torch.eye(64, device="cuda")
    out, state = torch.empty(64, 64, device="cuda"), torch.tensor([64, 0], dtype=torch.int32, device="cuda")
    for precision, exact in (("fp32", True), ("tf32", False)):
        with torch.inference_mode(), matmul_precision(precision):
            for run in layer.ways(x, out, None, state).values():
                run()
                assert bool((out == value).all()) is exact


@pytest.mark.gpu
def test_a_failed_device_makes_the_engine_unavailable_until_it_is_replaced(bundle):
    engine = started(bundle, "cuda:0")
    for lane in engine._pool.lanes:
        lane._run = Mock(side_effect=RuntimeError("CUDA error: unspecified launch failure"))
    with pytest.raises(Unavailable, match="device cuda:0 failed: CUDA error: unspecified launch failure"):
        engine.submit(block_of(bundle, 1))
    with pytest.raises(Unavailable, match="unspecified launch failure"):
        engine.check()
