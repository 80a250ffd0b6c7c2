"""What every command has: the common options, and one call of a suite with its device, result files, and what went wrong."""

import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.records.record import Record, run_facts
from benchmarks.records.result_file import ResultFile

RESULTS = Path(__file__).parents[1] / "results"

Names = Annotated[str, typer.Option(help="comma-separated")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
Seconds = Annotated[float, typer.Option(help="of timing, a system and cell")]
Ids = Annotated[str, typer.Option(help="zipf or uniform")]
Append = Annotated[bool, typer.Option(help="keep the file's records of other cells, each with its run, if of this machine")]
Out = Annotated[Path | None, typer.Option(help="JSON file; default results/<h200, .. or cpu>/<suite>.json")]


class Run:
    """One call: its device, the files of its suites, and what went wrong on the way. gpus: how many such it is of."""

    def __init__(self, suite: str, device: str, seed: int, out: Path | None, append: bool, gpus: int = 1) -> None:
        name = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device("cuda", 0) if name == "cuda" else torch.device(name)
        self._facts = run_facts(seed, self.device)
        folder = str(self._facts["gpu"] or "cpu").lower().removeprefix("nvidia ").replace(" ", "-") + (
            f"x{gpus}" if gpus > 1 else ""
        )
        self._path, self._append = out or RESULTS / folder / f"{suite}.json", append
        self._files: dict[str, ResultFile] = {}
        self._failures: list[str] = []
        self._file(suite)

    def _file(self, suite: str) -> ResultFile:
        """The suite's file; that of a second suite lies beside the first's."""
        if suite not in self._files:
            path = self._path if not self._files else self._path.with_name(f"{suite}.json")
            self._files[suite] = file = ResultFile(path, self._facts, append=self._append)
            if file.dropped:
                typer.echo(f"{path}: {file.dropped} will be replaced")
        return self._files[suite]

    def failed(self, what: str, error: Exception) -> None:
        """Says so at once; the exit status says it again at the end."""
        traceback.print_exception(error)
        typer.echo(f"FAILED {what}", err=True)
        self._failures.append(what)

    def add(self, record: Record) -> None:
        """Writes and prints one record."""
        self._file(record["suite"]).add(record)
        typer.echo(_line(record))

    def finish(self, records: Iterable[Record]) -> None:
        """Writes and prints records as they come; exits with 1 if anything failed, or if there was nothing to measure."""
        measured = 0
        for record in records:
            self.add(record)
            measured += 1
        for file in self._files.values():
            typer.echo(f"{file.path}: {len(file.records)} records")
        if self._failures:
            typer.echo(f"{len(self._failures)} failed: {'; '.join(self._failures)}", err=True)
            raise typer.Exit(1)
        if not measured:
            typer.echo(f"got nothing to measure, expected precisions and systems of which {self.device} has some", err=True)
            raise typer.Exit(1)


def _line(r: Record) -> str:
    where = " ".join(str(r[k]) for k in ("model", "precision") if r[k]) + (f" B={r['batch']}" if r["batch"] else "")
    parts = [f"{r['system']:24} {where:26}", *(f"{k}={v}" for k, v in r["cell"].items() if v is not False)]
    figures = {k: v for k, v in r.items() if v is not None and k not in ("speedup_vs", "cell", "calls", "rows_per_s")}
    parts += [f"{k} {v:.4g}" for k, v in figures.items() if isinstance(v, float)]
    return " ".join(parts)


def names_in(text: str) -> list[str]:
    """The parts of a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers_in(text: str) -> list[int]:
    """Whole numbers, comma-separated."""
    return [int(part) for part in names_in(text)]


def shares_in(text: str) -> list[float]:
    """Shares of the highest rate, comma-separated.

    Raises:
        typer.BadParameter: one offers nothing.
    """
    shares = [float(part) for part in names_in(text)]
    if any(share <= 0 for share in shares):
        raise typer.BadParameter(f"offered: got {text!r}, expected shares above 0")
    return shares
