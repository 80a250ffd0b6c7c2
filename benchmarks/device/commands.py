"""The commands of the suites that time models and lookups."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.device import ablation as stage_suites
from benchmarks.device import contexts as contexts_suite
from benchmarks.device import embedding as embedding_suite
from benchmarks.device import floor as floor_suite
from benchmarks.device import latency as latency_suite
from benchmarks.device import precision as precision_suite
from benchmarks.device import promotion as promotion_suite
from benchmarks.device import raw_values as raw_suite
from benchmarks.device import tiers as tiers_suite
from benchmarks.device import utilisation as utilisation_suite
from benchmarks.device import warmup as warmup_suite
from benchmarks.records.run import Append, Device, Ids, Names, Out, Run, Seconds, names_in, numbers_in
from benchmarks.systems import fbgemm, lookups
from benchmarks.systems.embedding_cells import BATCHES
from benchmarks.systems.embedding_cells import sweep as embedding_sweep
from benchmarks.systems.model_sweep import ModelSweep
from benchmarks.systems.names import BATCHES as MODEL_BATCHES
from benchmarks.systems.names import CONTEXTS, PAPER_MODELS
from benchmarks.workloads.models import MODELS
from dpiframe_core.bundle.bundle import read_bundle
from dpiframe_core.engine.options import PRECISIONS

app = typer.Typer()

_ALL, _FOUR = ",".join(MODELS), ",".join(PAPER_MODELS)
_BATCHES, _CONTEXTS = (",".join(map(str, sizes)) for sizes in (MODEL_BATCHES, CONTEXTS))
_TIERS = ",".join(tiers_suite.SYSTEMS)
_PEERS = "dpiframe,eager,compile-captured,compile-mapped"
MaxRows = Annotated[int, typer.Option(help="most rows of a table; 0: as published (MLPerf's are 52 GB)")]
Contexts = Annotated[str, typer.Option(help="of a batch, comma-separated, for models whose rows share features")]
_EMBEDDING_BATCHES = ",".join(map(str, BATCHES))


def _systems(text: str) -> list[str]:
    names = names_in(text)
    if any(n.startswith("fbgemm") for n in names):
        fbgemm.require()  # now, not after minutes of measuring
    return names


def _sweep(
    run: Run,
    models: str,
    precisions: str,
    batches: str,
    seconds: float,
    seed: int,
    ids: str,
    *,
    contexts: str = "1",
    max_rows: int = 0,
) -> ModelSweep:
    return ModelSweep(
        names_in(models), names_in(precisions), numbers_in(batches), device=run.device, failed=run.failed, seconds=seconds,
        seed=seed, skew=ids, contexts=numbers_in(contexts), most_rows=max_rows or None,
    )  # fmt: skip


@app.command()
def latency(
    models: Names = _ALL,
    precisions: Names = "tf32,bf16,fp32",
    batches: Names = _BATCHES,
    contexts: Contexts = _CONTEXTS,
    max_rows: MaxRows = 0,
    systems: Names = "dpiframe,dpiframe-in-place,eager,stacked-eager,compile-captured,compile-mapped",
    buckets: Annotated[str, typer.Option(help="exact: captured for the batch; default: as serving captures")] = "exact",
    with_floor: Annotated[bool, typer.Option("--floor", help="suite floor too, from the same calls")] = False,
    gemm: Annotated[int, typer.Option(help="side of the product whose rate is the floor's")] = 8192,
    device: Device = "auto",
    seconds: Seconds = 0.3,
    ids: Ids = "zipf",
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """Whole models, host to host, of any of the nine systems that docs/benchmarks.md names."""
    names = _systems(systems)
    run = Run("latency", device, seed, out, append)
    sweep = _sweep(run, models, precisions, batches, seconds, seed, ids, contexts=contexts, max_rows=max_rows)
    machine = None
    if with_floor:
        machine = floor_suite.measure(run.device, PRECISIONS[run.device.type], gemm)
        run.add(floor_suite.machine_record(machine, gemm))
    run.finish(latency_suite.run(sweep, names, buckets=buckets, machine=machine))


@app.command()
def embedding(
    batches: Names = _EMBEDDING_BATCHES,
    dtypes: Names = "float32,float16,int8",
    systems: Names = "",
    only: Annotated[str, typer.Option(help="all, sweep (one axis at a time), large (tables) or bags (of 1 to 100)")] = "all",
    max_rows: Annotated[int, typer.Option(help="of a table; 0: as Criteo has them, on a CPU a million")] = 0,
    device: Device = "auto",
    seconds: Seconds = 0.1,
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """The lookup alone: batch, dim, fields, one-hot and multi-hot, Zipf and uniform ids, table dtype, one axis at a time."""
    run = Run("embedding", device, seed, out, append)
    names = _systems(systems or ",".join(lookups.SYSTEMS if run.device.type == "cuda" else lookups.SYSTEMS[:3]))
    cells = [c for c in embedding_sweep(names_in(dtypes), numbers_in(batches)) if only in ("all", c.part)]
    most = max_rows or None
    if run.device.type == "cpu":  # host memory is no 141 GB, and no bandwidth is claimed for it
        cells, most = [c for c in cells if c.part == "sweep" and c.dtype != "int8"], max_rows or 1_000_000
    run.finish(embedding_suite.run(cells, names, run.device, run.failed, seconds=seconds, seed=seed, max_rows=most))


@app.command()
def tiers(
    rows: Annotated[int, typer.Option(help="of each table")] = 4_000_000,
    tables: int = 26,
    dims: Names = "32,128",
    zipfs: Annotated[str, typer.Option(help="exponents of how often rows are read")] = "0.8,1.1,1.4",
    shares: Annotated[str, typer.Option(help="of the tables' bytes that the GPU's memory holds")] = "1,0.5,0.25,0.125",
    batches: Names = "128,1024,4096",
    poolings: Names = "1,8",
    systems: Names = _TIERS,
    device: Device = "auto",
    seconds: Seconds = 0.1,
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """The lookup over tables of which the GPU's memory holds a share, and the host's the rest."""
    run = Run("tiers", device, seed, out, append)
    sets = [tiers_suite.Tables(tables, rows, dim, float(zipf)) for dim in numbers_in(dims) for zipf in names_in(zipfs)]
    run.finish(tiers_suite.run(
        sets, [float(s) for s in names_in(shares)], numbers_in(batches), numbers_in(poolings), names_in(systems), run.device,
        run.failed, seconds=seconds, seed=seed,
    ))  # fmt: skip


@app.command("tiers-promotion")
def tiers_promotion(
    zipfs: Annotated[str, typer.Option(help="exponents of how often rows are read")] = "0.8,1.05",
    disks: Annotated[str, typer.Option(help="us of each row that is read in a file, beyond the page cache")] = "0,80",
    batch: Annotated[int, typer.Option(help="rows of a request")] = 270,
    requests: int = 8000,
    held: Annotated[float, typer.Option(help="share of each table that the plan has in memory")] = 0.02,
    slots: Annotated[float, typer.Option(help="share of each table for which there are slots for rows of files")] = 0.02,
    every: Annotated[int, typer.Option(help="requests after which rows may change places")] = 1000,
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """Rows of files that stay in memory as they are read often, while traffic changes; on a CPU."""
    run = Run("tiers-promotion", "cpu", seed, out, append)
    each = ((float(zipf), float(disk)) for zipf in names_in(zipfs) for disk in names_in(disks))
    traffics = [promotion_suite.Traffic(zipf, held, slots, disk, requests, every) for zipf, disk in each]
    run.finish(promotion_suite.run(traffics, batch, run.failed, seed=seed))


@app.command()
def ablation(
    models: Names = _FOUR,
    precisions: Names = "tf32",
    batches: Names = "256,1024",
    first_op: Annotated[bool, typer.Option(help="suite first_op too, on the same engines")] = False,
    device: Device = "auto",
    seconds: Seconds = 0.2,
    ids: Ids = "zipf",
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """Host to host, a component added at a time."""
    run = Run("ablation", device, seed, out, append)
    sweep = _sweep(run, models, precisions, batches, seconds, seed, ids)
    run.finish(stage_suites.run(["ablation", *["first_op"] * first_op], sweep))


@app.command("first_op")
def first_op(
    models: Names = _FOUR,
    precisions: Names = "tf32",
    batches: Names = "256,1024",
    device: Device = "auto",
    seconds: Seconds = 0.2,
    ids: Ids = "zipf",
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """From the first operator's launch to the end, as the paper measures."""
    run = Run("first_op", device, seed, out, append)
    sweep = _sweep(run, models, precisions, batches, seconds, seed, ids)
    run.finish(stage_suites.run(["first_op"], sweep))


@app.command()
def utilisation(
    models: Names = "dcnv2,deepfm",
    precisions: Names = "tf32",
    batches: Names = "256,1024",
    systems: Names = _PEERS,
    lanes: Names = "1,2,4",
    device: Device = "auto",
    seconds: Seconds = 1.0,
    ids: Ids = "zipf",
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """Rows a second and SM activity in a saturated loop, by lanes."""
    names = _systems(systems)
    run = Run("utilisation", device, seed, out, append)
    sweep = _sweep(run, models, precisions, batches, seconds, seed, ids)
    run.finish(utilisation_suite.run(sweep, names, lanes=numbers_in(lanes)))


@app.command()
def mlperf(
    precisions: Names = "bf16,tf32",
    batches: Names = "1024,8192,16384",
    max_rows: MaxRows = 0,
    systems: Names = _PEERS,
    lanes: Names = "1,2,4",
    int8: Annotated[bool, typer.Option(help="the engine's tables are int8; the source model and peers read float16")] = False,
    device: Device = "auto",
    seconds: Seconds = 1.0,
    ids: Ids = "zipf",
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """MLPerf's DLRM-DCNv2, pairs a second from ids in host memory, by lanes, as `utilisation` saturates it."""
    names = _systems(systems)
    run = Run("mlperf", device, seed, out, append)
    sweep = _sweep(run, "mlperf", precisions, batches, seconds, seed, ids, max_rows=max_rows)
    sweep = replace(sweep, make=partial(sweep.make, quantized=int8))
    run.finish(utilisation_suite.run(sweep, names, lanes=numbers_in(lanes), suite="mlperf"))


@app.command()
def floor(
    models: Names = _FOUR,
    precisions: Names = "bf16,tf32,fp32",
    batches: Names = _BATCHES,
    gemm: Annotated[int, typer.Option(help="side of the product whose rate is measured")] = 8192,
    device: Device = "auto",
    seconds: Seconds = 0.2,
    ids: Ids = "zipf",
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """Our latency against launch + bytes / bandwidth + operations / rate, all measured in this run."""
    run = Run("floor", device, seed, out, append)
    sweep = _sweep(run, models, precisions, batches, seconds, seed, ids)
    run.finish(floor_suite.run(sweep, gemm=gemm))


@app.command()
def contexts(
    models: Names = _FOUR,
    precisions: Names = "tf32,bf16",
    batches: Names = "256,1000,4096",
    contexts: Contexts = "1,4,32,256",
    max_rows: MaxRows = 0,
    device: Device = "auto",
    seconds: Seconds = 0.3,
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """The paper's models with half of their fields from the context: what rows share, computed for each row and once."""
    run = Run("contexts", device, seed, out, append)
    given = names_in(models), names_in(precisions), numbers_in(batches), numbers_in(contexts)
    run.finish(
        contexts_suite.run(*given, run.device, run.failed, seconds=seconds, seed=seed, most_rows=max_rows or None)
    )  # fmt: skip


@app.command()
def raw(
    models: Names = f"{raw_suite.TINY},autoint",
    batches: Names = "1,8,64,256,1024",
    max_rows: MaxRows = 100_000,
    threads: Annotated[int, typer.Option(help="that torch and our C code compute with")] = 1,
    seconds: Seconds = 0.3,
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """Raw values through an engine on a CPU, against the compiled module itself on ready ids; by the calling thread's time."""
    run = Run("raw", "cpu", seed, out, append)
    torch.set_num_threads(threads)
    sweep = _sweep(run, models, "fp32", batches, seconds, seed, "zipf", max_rows=max_rows)
    run.finish(raw_suite.run(replace(sweep, make=raw_suite.made)))


@app.command()
def precision(
    bundle: Path = Path("models/demo"),
    held_out: Annotated[Path | None, typer.Option(help="npz of the held-out rows; drawn anew, and written, if absent")] = None,
    rows: Annotated[int, typer.Option(help="of the demo's log, as the bundle was made")] = 300_000,
    log_seed: int = 7,
    precisions: Names = "",
    device: Device = "auto",
    seconds: Seconds = 0.3,
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """Deviation, Kendall's tau and AUC of each precision on the demo model's held-out clicks (`dpiframe demo` makes it)."""
    run = Run("precision", device, seed, out, append)
    found = read_bundle(bundle)
    data = precision_suite.held_out(found, held_out, rows=rows, seed=log_seed)
    names = names_in(precisions) or list(PRECISIONS[run.device.type])
    run.finish(precision_suite.run(found, data, names, run.device, run.failed, seconds=seconds))


@app.command()
def warmup(
    models: Names = _FOUR,
    precisions: Names = "tf32",
    max_batch_rows: int = 4096,
    device: Device = "auto",
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """Seconds until an engine is ready with all buckets, with and without what an earlier start left, and its memory."""
    run = Run("warmup", device, seed, out, append)
    options = {"max_batch_rows": max_batch_rows, "seed": seed}
    run.finish(warmup_suite.run(names_in(models), names_in(precisions), run.device, run.failed, **options))
