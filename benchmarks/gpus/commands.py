"""The command that measures tables which several GPUs hold together. A process a GPU runs it."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.gpus import grid, large, links, loading, places, torchrec_bags
from benchmarks.gpus.group import Group
from benchmarks.records.record import Record
from benchmarks.records.run import Append, Names, Out, Run
from deployments.cli.tables.measured_links import parse_links

app = typer.Typer()
PARTS = "links,grid,places,large,load"
_SYSTEMS = ",".join(grid.SYSTEMS)


@app.command("tiers-gpus")
def tiers_gpus(
    parts: Names = PARTS,
    tables: Annotated[str, typer.Option(help="of the grid")] = "2,8,32,64",
    rows: Annotated[int, typer.Option(help="of each table of the grid")] = 250_000,
    dims: Annotated[str, typer.Option(help="of the grid")] = "32,128",
    batches: Names = "128,1024,4096",
    poolings: Annotated[str, typer.Option(help="of the grid")] = "4,8,16",
    systems: Annotated[str, typer.Option(help="of the grid")] = _SYSTEMS,
    alone: Annotated[bool, typer.Option(help="the grid on one GPU too")] = True,
    zipfs: Annotated[str, typer.Option(help="of the three placements")] = "0.8,1.1,1.4",
    hbm_mib: Annotated[int, typer.Option(help="of each GPU for each of the three placements, which lie there at once")] = 256,
    times_hbm: Annotated[str, typer.Option(help="sizes of their tables")] = "0.5,1,2,4,8",
    large_gb: Annotated[float, typer.Option(help="of tables")] = 4,
    large_hbm_gb: Annotated[float, typer.Option(help="of each GPU for them")] = 1,
    large_host_gb: Annotated[float, typer.Option(help="of host memory for them, the rest in files; 0: all the rest")] = 0,
    spreads_mib: Annotated[str, typer.Option(help="over which rows of each link are spread")] = "256,512,1024,2048,4096",
    load_gb: Annotated[float, typer.Option(help="of tables in files")] = 4,
    load_folder: Annotated[Path, typer.Option(help="where these lie")] = Path("build/tiers-load"),
    given_links: Annotated[str, typer.Option("--links", help="as of `dpiframe plan`")] = "",
    sees_one: Annotated[bool, typer.Option(help="each process sees its own GPU alone")] = True,
    seconds: Annotated[float, typer.Option(help="of timing, a system and cell")] = 0.05,
    seed: int = 0,
    append: Append = False,
    out: Out = None,
) -> None:
    """Lookups over rows that several GPUs hold: against collectives, and by three ways to place them. Start it with
    `python -m torch.distributed.run --nproc-per-node N -m benchmarks tiers-gpus`; part `torchrec`, which is not among the
    default ones, as a process of its own."""
    group = Group(sees_one)
    run = Run("tiers", "auto", seed, out, append, gpus=group.size) if group.rank == 0 else None
    failures: list[str] = []

    def failed(what: str, error: Exception) -> None:
        failures.append(what)
        if run:
            run.failed(what, error)

    speeds = parse_links(given_links or None)
    each = tuple(map(int, batches.split(",")))
    sets = [grid.Set(t, rows, d) for d in map(int, dims.split(",")) for t in map(int, tables.split(","))]
    made: Mapping[str, Callable[[], Iterable[Record]]] = {
        "links": lambda: links.run(
            group, [int(float(m) * 2**20) for m in spreads_mib.split(",")], (64, 128, 256, 512), failed, seed=seed
        ),
        "grid": lambda: grid.run(
            group, sets, each, tuple(map(int, poolings.split(","))), systems.split(","), failed, seconds=seconds, seed=seed,
            alone=alone,
        ),
        "places": lambda: places.run(
            group, tuple(map(float, times_hbm.split(","))), tuple(map(float, zipfs.split(","))), each, failed,
            hbm_bytes=hbm_mib << 20, tables=16, dim=64, pooling=8, links=speeds, seconds=seconds, seed=seed,
        ),
        "large": lambda: large.run(
            group, int(large_gb * 1e9), int(large_hbm_gb * 1e9), (270, 1024, 4096), tables=26, dim=128, zipf=1.05, links=speeds,
            seconds=max(1.0, seconds), seed=seed, host_bytes=int(large_host_gb * 1e9) or None,
        ),
        "torchrec": lambda: torchrec_bags.run(
            group, sets, each, tuple(map(int, poolings.split(","))), torch.cuda.device_count(), failed, seconds=seconds,
            seed=seed,
        ),
        "load": lambda: loading.run(group, load_folder, int(load_gb * 1e9), tables=32, dim=128, seed=seed),
    }  # fmt: skip
    records = _parts(parts.split(","), made, failed)
    if run:
        run.finish(records)
    else:
        for _ in records:
            pass
    group.close()


def _parts(
    names: Iterable[str], made: Mapping[str, Callable[[], Iterable[Record]]], failed: Callable[[str, Exception], None]
) -> Iterable[Record]:
    for name in names:
        try:
            yield from made[name]()
        except Exception as failure:
            failed(name, failure)
