"""The `dpiframe import` commands: a model of another library in, a bundle out. Parses arguments and prints the report."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deployments.cli.terminal import err, one_line_errors, stdout
from deployments.signals import interrupted_by_sigterm

if TYPE_CHECKING:
    from dpiframe_core.importers.source_model import SourceModel

import_app = typer.Typer(no_args_is_help=True, help="Turn a model of another library into a bundle, with proof of parity.")

Out = Annotated[Path | None, typer.Option("-o", "--out", help="The directory of the new bundle; needed without --dry-run.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what was found and would be written, and write nothing.")]
Name = Annotated[str | None, typer.Option(help="The model's name in the service; by default its kind.")]
Version = Annotated[str, typer.Option(help="The model's version in the service.")]
Context = Annotated[str, typer.Option(help="Features that a request gives once, separated by commas.")]
Rows = Annotated[
    Path | None, typer.Option("--golden-rows", help="Raw rows (as for `score`) to compare on; random ones without.")
]
Expected = Annotated[Path | None, typer.Option(help="The library's own scores on those rows, as a CSV file.")]
Label = Annotated[str | None, typer.Option(help="The column of clicks in the rows, for AUC and log-loss.")]
Source = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:CLASS",
        help="The model's own class, for what is not imported by name. This RUNS that file and what it imports (the library "
        "must be installed): name only code that you trust. Without it nothing of a run is executed.",
    ),
]
Maker = Annotated[
    str | None,
    typer.Option(
        "--source",
        metavar="FILE.py:NAME",
        help="A class, or a function, that makes the model when called without arguments (by `recbole` with config and "
        "dataset, as RecBole's classes are), for what is not imported by name. "
        "This RUNS that file and what it imports (the library must be installed): name only code that you trust. Without it "
        "nothing of yours is executed.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an older bundle.")]
Checkpoint = Annotated[Path, typer.Argument(help="A state_dict saved by torch.save.")]
Spec = Annotated[Path, typer.Option(help="What the checkpoint does not say, as YAML.")]


@import_app.command()
def fuxictr(
    run: Annotated[Path, typer.Argument(help="A training run's directory, or its checkpoint.")],
    out: Out = None,
    feature_map: Annotated[Path | None, typer.Option(help="By default feature_map.json beside the checkpoint.")] = None,
    vocab: Annotated[Path | None, typer.Option(help="By default feature_vocab.json.")] = None,
    config: Annotated[Path | None, typer.Option(help="The run's parameters; by default config.yaml.")] = None,
    processor: Annotated[Path | None, typer.Option(help="By default feature_processor.pkl; read without unpickling.")] = None,
    normalizers: Annotated[Path | None, typer.Option(help="The numeric normalisers as YAML, instead of the processor.")] = None,
    source: Source = None,
    context: Context = "",
    golden_rows: Rows = None,
    expected: Expected = None,
    label: Label = None,
    name: Name = None,
    version: Version = "1",
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> None:
    """Import a FuxiCTR 2.3 run. test.csv and expected.csv in its directory are compared on if nothing else is named."""
    from dpiframe_core.importers.fuxictr.files import find_files
    from dpiframe_core.importers.fuxictr.own import fuxictr_own
    from dpiframe_core.importers.fuxictr.run import fuxictr as read

    beside = run if run.is_dir() else run.parent
    if golden_rows is None and expected is None and (beside / "test.csv").is_file():
        golden_rows = beside / "test.csv"
        expected = beside / "expected.csv" if (beside / "expected.csv").is_file() else None

    def model() -> "SourceModel":
        files = find_files(run, feature_map, vocab, config, processor, normalizers)
        return read(files, _names(context)) if source is None else fuxictr_own(files, source, _names(context))

    _write(model, out, golden_rows, expected, label, name, version, overwrite, dry_run)


def _source_model(library: str, checkpoint: Path, spec: Path, source: str | None = None) -> "SourceModel":
    """By the reader of that library alone: the others are not imported."""
    if library == "recbole":
        from dpiframe_core.importers.recbole import checkpoint as by_name
        from dpiframe_core.importers.recbole import own

        return by_name.recbole(checkpoint, spec) if source is None else own.recbole_own(checkpoint, spec, source)
    if source is not None:
        from dpiframe_core.importers.own_module import deepctr_torch_own, torch_rechub_own

        return (deepctr_torch_own if library == "deepctr-torch" else torch_rechub_own)(checkpoint, spec, source)
    if library == "deepctr-torch":
        from dpiframe_core.importers.deepctr.checkpoint import deepctr_torch_checkpoint as reader
    elif library == "torch-rechub":
        from dpiframe_core.importers.rechub import torch_rechub as reader
    else:
        from dpiframe_core.importers import dlrm

        reader = {"torchrec": dlrm.torchrec, "dlrm": dlrm.facebook_dlrm}[library]
    return reader(checkpoint, spec)


def _of_checkpoint(library: str, about: str, *, by_source: bool = True) -> None:
    """Adds the command of a library whose models are a checkpoint and a spec. by_source: whether it takes `--source`."""

    def command(
        checkpoint: Checkpoint, spec: Spec, out: Out = None, golden_rows: Rows = None, expected: Expected = None,
        label: Label = None, name: Name = None, version: Version = "1", overwrite: Overwrite = False, dry_run: DryRun = False,
    ) -> None:  # fmt: skip
        read = partial(_source_model, library, checkpoint, spec)
        _write(read, out, golden_rows, expected, label, name, version, overwrite, dry_run)

    def sourced(
        checkpoint: Checkpoint, spec: Spec, out: Out = None, source: Maker = None, golden_rows: Rows = None,
        expected: Expected = None, label: Label = None, name: Name = None, version: Version = "1", overwrite: Overwrite = False,
        dry_run: DryRun = False,
    ) -> None:  # fmt: skip
        read = partial(_source_model, library, checkpoint, spec, source)
        _write(read, out, golden_rows, expected, label, name, version, overwrite, dry_run)

    import_app.command(library, help=about)(sourced if by_source else command)


_of_checkpoint("deepctr-torch", "Import a DeepCTR-Torch 0.3 model: WDL, DeepFM, xDeepFM, DCN, DCNMix, DIN; others by --source.")
_of_checkpoint("torchrec", "Import a TorchRec DLRM or DLRM_DCN.", by_source=False)
_of_checkpoint("dlrm", "Import a DLRM_Net of facebookresearch/dlrm.", by_source=False)
_of_checkpoint(
    "recbole", "Import a RecBole 1.2 model: FM, NFM, DeepFM, WideDeep, DCN, xDeepFM, AutoInt, DIN, DIEN; others by --source."
)
_of_checkpoint("torch-rechub", "Import a ranking model of torch-rechub: WideDeep, DeepFM, DCN, DCNv2; others by --source.")


def _write(
    read: "Callable[[], SourceModel]",
    out: Path | None,
    rows: Path | None,
    expected: Path | None,
    label: str | None,
    name: str | None,
    version: str,
    overwrite: bool,
    dry_run: bool,
) -> None:
    from dpiframe_core.errors import InputError
    from dpiframe_core.importers.findings import findings
    from dpiframe_core.importers.writing import write_import

    with one_line_errors(), interrupted_by_sigterm():  # what was begun is taken away
        if out is None and not dry_run:
            raise InputError.worded("--out", "nothing", "the directory of the new bundle, or --dry-run")
        if out is None or dry_run:
            stdout.print(findings(read()), markup=False, soft_wrap=True)
            return
        with _progress_bar() as progress:
            made = write_import(
                read(), out, name=name, version=version, rows=rows, expected=expected, label=label, overwrite=overwrite,
                progress=progress,
            )  # fmt: skip
        stdout.print(made.report(), markup=False, soft_wrap=True)
        stdout.print(f"bundle: {out}", markup=False, soft_wrap=True)


@contextmanager
def _progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr while the block runs, if that is a terminal; to be told what is done, and bytes of how many."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("Reading", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
