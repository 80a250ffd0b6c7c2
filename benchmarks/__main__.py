"""`python -m benchmarks SUITE`: measures side by side and writes `benchmarks/results/<machine>/<suite>.json`."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import http as http_suite
from benchmarks import latency as latency_suite
from benchmarks import report as report_suite
from benchmarks.record import run_facts, write
from benchmarks.workload import MODELS

app = typer.Typer(no_args_is_help=True, add_completion=False)
RESULTS = Path(__file__).parent / "results"


def _folder(facts: dict[str, Any]) -> str:
    """`h200` for an NVIDIA H200; `cpu` without a GPU."""
    return str(facts["gpu"] or "cpu").lower().removeprefix("nvidia ").replace(" ", "-")


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@app.command()
def latency(
    models: str = ",".join(MODELS),
    precisions: str = "tf32,fp32",
    batches: str = "1,64,256,1024,4096",
    systems: str = "dpiframe,eager,stacked-eager,compile-captured",
    device: str = "auto",
    seconds: float = 0.5,
    ids: str = "zipf",
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file; default results/<h200 or cpu>/latency.json")] = None,
) -> None:
    """Whole models, host to host."""
    target = torch.device("cuda" if device == "auto" and torch.cuda.is_available() else "cpu" if device == "auto" else device)
    target = torch.device("cuda", 0) if target.type == "cuda" else target
    facts = run_facts(seed)
    file = out or RESULTS / ("cpu" if target.type == "cpu" else _folder(facts)) / "latency.json"
    records = []
    for record in latency_suite.run(
        _list(models), _list(precisions), [int(b) for b in _list(batches)], _list(systems), target,
        seconds=seconds, skew=ids, seed=seed,
    ):  # fmt: skip
        records.append(record)
        typer.echo(
            f"{record['model']:10} {record['precision']} B={record['batch']:<5} {record['system']:17} "
            f"p50 {record['p50_us']:9.1f} us  p99 {record['p99_us']:9.1f}  err {record['max_abs_err']:.1e}"
        )
        write(file, facts, records)  # after each, so that a run cut short leaves what it had


@app.command()
def http(
    bundle: Path = Path("models/demo"),
    rows: int = 100,
    clients: str = "1,16",
    seconds: float = 8.0,
    seed: int = 0,
    out: Path | None = None,
) -> None:
    """The endpoint against uvicorn + FastAPI with the eager model, client to client."""
    records = []
    for record in http_suite.run(bundle, rows, [int(c) for c in _list(clients)], seconds, seed):
        records.append(record)
        typer.echo(
            f"{record['system']:14} {record['clients']:3} clients  p50 {record['p50_us'] / 1e3:7.2f} ms  "
            f"p99 {record['p99_us'] / 1e3:7.2f} ms  {record['requests_per_s']:8.0f} requests/s"
        )
    facts = run_facts(seed)
    write(out or RESULTS / _folder(facts) / "http.json", facts, records)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="a folder of results")] = RESULTS / "h200") -> None:
    """Writes RESULTS.md beside the JSON files of a folder, from them alone."""
    typer.echo(report_suite.write_tables(folder))


if __name__ == "__main__":
    app()
