"""What `dpiframe plan` does: reads of rows and the memory of GPUs in; where rows should lie, and the predicted time, out."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deployments.offline.output_file import check_outside
from dpiframe_core.bundle.encoding_files import Encoding, read_encoding
from dpiframe_core.embedding.place_rows import place_rows
from dpiframe_core.embedding.placement import Links, Placement, Tiers, predicted_links, tier_reads, uniform
from dpiframe_core.embedding.placement_file import check_free, write_placement
from dpiframe_core.embedding.row_counts import RowCounts, count_rows, zipf_counts
from dpiframe_core.errors import InputError
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.files.row_files import RowFile, column_names, iter_chunks
from dpiframe_core.files.table_rows import TableEncoder, column_types, missing_features, splitters

_CHUNK_ROWS = 1 << 16
_GIB, _GB = 1 << 30, 1e9
_MOST_GIB = 1_000_000  # that an option takes
_HEADS = ("table", "rows x dim", "MB", "hot", "warm", "host", "reads hot", "warm", "host")


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Filled by `plan`. counts: what it is for. reads: by table, how many each tier serves; file_reads: the share of them that
    no memory does. links, in_hbm, in_host: predicted seconds that each link is busy for a scored row, by the placement, with
    all rows on every GPU, and with all in host memory.
    """

    model: str
    version: str
    schema: FeatureSchema
    counts: RowCounts
    source: str
    placement: Placement
    reads: dict[str, Tiers]
    file_reads: float
    links: Tiers
    in_hbm: Tiers
    in_host: Tiers

    def report(self, batch: int) -> str:
        """For people; lookups are those of `batch` rows."""
        lines: list[tuple[str, ...]] = [_HEADS]
        for p in self.placement.tables:
            table, reads = self.schema.table(p.table), self.reads[p.table]
            places = (p.hot, p.warm - p.hot, p.held - p.warm)
            size = f"{table.bytes_used / 1e6:,.2f}"
            lines.append((p.table, f"{p.rows:,} x {table.dim}", size, *(f"{n:,}" for n in places), *_shares(reads)))
        total = Tiers(*(sum(tier) for tier in zip(*self.reads.values(), strict=True))) if self.reads else Tiers(0, 0, 0)
        shares = ", ".join(f"{share} {name}" for share, name in zip(_shares(total), ("hot", "warm", "host"), strict=True))
        gpus = f"{self.placement.gpus} GPU{'s' if self.placement.gpus > 1 else ''}"
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            (
                *("  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))) for row in lines),
                f"{self.model} {self.version} on {gpus}, {self.source}: {shares}",
                f"bytes: {self.placement.gpu_bytes(self.schema) / _GB:,.3f} GB on each GPU, "
                f"{self.placement.host_bytes(self.schema) / _GB:,.3f} GB in host memory",
                *self._in_files(),
                f"predicted lookup of {batch:,} rows: {_us(self.links, batch)}, bound by {_busiest(self.links)}; "
                f"all rows in HBM {_us(self.in_hbm, batch)}, all in host memory {_us(self.in_host, batch)}",
            )
        )

    def _in_files(self) -> tuple[str, ...]:
        rows = sum(p.in_files for p in self.placement.tables)
        if not rows:
            return ()
        size = sum(p.in_files * self.schema.table(p.table).row_bytes for p in self.placement.tables)
        return (f"in files alone: {rows:,} rows, {size / _GB:,.3f} GB, {self.file_reads:.2%} of reads (counted as the host's)",)


def write_plan(
    bundle: Path,
    gpus: int,
    hbm_gib: float,
    trace: Path | None,
    zipf: float,
    links: Links,
    out: Path | None,
    host_gib: float | None = None,
) -> Plan:
    """Plans for the bundle at a path, of which no table is read; `out`: the directory to write the placement to.

    Raises:
        InputError: `out` is taken, the trace or a number will not do, or too little memory.
        BundleError: the bundle is faulty.
    """
    if out is not None:
        check_free(out, "--out")
        check_outside("--out", out)
    read = read_encoding(bundle)
    schema = read.manifest.feature_schema
    if trace is None:
        counts, source = zipf_counts(schema, zipf), f"reads by Zipf's law of exponent {zipf:g}"
    else:
        counts = count_rows(schema, trace_blocks(read, trace))
        source = f"reads of {counts.rows:,} rows of {trace}"
    hbm, host = _bytes("--hbm-gib", hbm_gib), None if host_gib is None else _bytes("--host-gib", host_gib)
    made = plan(read, counts, source, gpus, hbm, links, host)
    if out is not None:
        write_placement(out, made.placement)
    return made


def _bytes(option: str, gib: float) -> int:
    if not gib < _MOST_GIB:
        raise InputError(option, gib, f"a number below {_MOST_GIB:,}")
    return int(gib * _GIB)


def plan(
    read: Encoding, counts: RowCounts, source: str, gpus: int, hbm_bytes: int, links: Links, host_bytes: int | None = None
) -> Plan:
    """The placement for reads counted, and what it is predicted to do for them."""
    schema = read.manifest.feature_schema
    placement = place_rows(schema, counts, gpus, hbm_bytes, links, host_bytes)
    each = placement, uniform(schema, hot=True), uniform(schema, hot=False)
    times = (predicted_links(schema, counts, p, links) for p in each)
    reads, of_files = tier_reads(counts, placement), placement.file_reads(counts)
    return Plan(read.manifest.name, read.manifest.version, schema, counts, source, placement, reads, of_files, *times)


def trace_blocks(read: Encoding, trace: Path) -> Iterator[RowBlock]:
    """The encoded rows of a file of raw rows, as `dpiframe score` reads them; each row is a request of its own.

    Raises:
        InputError: the file cannot be read, a column lacks, a value is bad.
    """
    schema = read.manifest.feature_schema
    whole = RowFile(trace, column_types(schema), splitters(schema))
    unsplit = [f.name for f in schema.features if f.max_values > 1 and f.name not in whole.separators]
    if unsplit and trace.suffix.lower() in (".csv", ".tsv"):
        raise InputError(
            "--trace", str(trace), f"Parquet or JSON lines, as {', '.join(unsplit)} has several values and no splitter"
        )
    found = column_names(whole)
    if lacking := missing_features(schema, found):
        raise InputError(f"{trace}, columns", found, f"columns for the features {', '.join(lacking)} too")
    file = RowFile(trace, whole.types, whole.separators, tuple(f.name for f in schema.features))
    encoder = TableEncoder(Encoder(schema, read.vocabularies))
    for chunk in iter_chunks(file, _CHUNK_ROWS):

        def place(name: str, row: int, first: int = chunk.first_row) -> str:
            return file.place(name, first + row)

        yield encoder.encode(chunk.table, place)


def _shares(reads: Tiers) -> tuple[str, ...]:
    return tuple(f"{tier / max(sum(reads), 1):.1%}" for tier in reads)


def _us(links: Tiers, batch: int) -> str:
    return f"{max(links) * batch * 1e6:,.1f} us"


def _busiest(links: Tiers) -> str:
    names = ("the local HBM", "the link between GPUs", "the link to the host")
    return names[max(range(3), key=lambda i: links[i])]
