"""`dpiframe_core.compile`: a plain module in, the parts of an ordinary bundle out, its scores proved equal on the example."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import tee
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from dpiframe_core.bundle.bundle import Golden, Manifest, Provenance, VocabularyTable, write_bundle
from dpiframe_core.bundle.manifest import vocabulary_names
from dpiframe_core.compiler.cpu_scores import cpu_lane, cpu_scores
from dpiframe_core.compiler.examples import (
    TOLERANCE,
    Call,
    Output,
    RawColumns,
    Scored,
    check_padded_steps,
    check_rows,
    evaluating,
    example_block,
    raw_columns,
    source_scores,
)
from dpiframe_core.compiler.joined_tables import JoinedTables
from dpiframe_core.compiler.lookups import Lookups
from dpiframe_core.compiler.lower import Lowering
from dpiframe_core.compiler.operations.strided import Strided
from dpiframe_core.compiler.tidy import tidied
from dpiframe_core.compiler.trace import Trace, traces
from dpiframe_core.describe.module_summary import Timed, in_turns, module_summary
from dpiframe_core.engine.cpu_lane import CpuLane
from dpiframe_core.errors import BundleError, InputError, listed
from dpiframe_core.features.candidate_columns import check_request
from dpiframe_core.features.encoder import Encoder
from dpiframe_core.features.examples import raw_example
from dpiframe_core.features.row_block import Floats, RowBlock
from dpiframe_core.features.schema import FeatureSchema
from dpiframe_core.graph.architecture import GraphFile
from dpiframe_core.graph.graph import Graph
from dpiframe_core.strict import told

_TIMED_ROWS = 1, 256
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}")


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """A module as the parts of a bundle.

    Attributes:
        schema: as given. graph: what is computed, before fusion.
        dense: parameter name -> float32 tensor. tables: table name -> float32[rows, dim]; both in the module's
            own memory where they are as it has them.
        golden: the example's rows and the module's own scores on them.
        deviation: largest difference between those and the compiled scores on the CPU.
        tasks: a name for each column of scores: "click" for one; as `output` names them; else "task0", "task1" and so on.
        module, example: as given, for `summary`.
    """

    schema: FeatureSchema
    graph: Graph
    dense: dict[str, torch.Tensor]
    tables: Mapping[str, torch.Tensor]
    golden: Golden
    deviation: float
    tasks: tuple[str, ...]
    module: Scored
    example: Mapping[str, torch.Tensor]

    def write(
        self,
        path: str | os.PathLike[str],
        *,
        name: str,
        version: str = "1",
        vocabularies: Mapping[str, VocabularyTable | Mapping[str, int] | Mapping[int, int]] | None = None,
        provenance: Provenance | None = None,
        tasks: Sequence[str] | None = None,
        example: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> Manifest:
        """Writes the bundle; vocabularies as the schema's encoders need them, tables or mappings of values to ids. `tasks`:
        other names for the columns of scores. `example`: a raw request, by default one of the first rows that the module was
        compiled with. Raises as `write_bundle`.

        Raises:
            InputError: other than one name for each column of scores; an example that is no request of this model; a mapping
                that is no vocabulary.
        """
        scores = self.golden.scores.shape[1]
        tasks = self.tasks if tasks is None else tasks
        if isinstance(tasks, str) or len(tasks) != scores:
            raise InputError("tasks", tasks, f"{scores} names, one for each score that the module gives")
        known = {n: _vocabulary(n, v) for n, v in (vocabularies or {}).items()}
        if example is not None:
            check_request(Encoder(self.schema, known).encode, example)
        elif not set(vocabulary_names(self.schema)) - known.keys():
            example = raw_example(self.schema, self.golden.block, known)
        return write_bundle(
            path, name=name, version=version, architecture=GraphFile(), graph=self.graph, feature_schema=self.schema,
            dense=self.dense, tables=self.tables, vocabularies=known, golden=self.golden, example=example,
            provenance=provenance or Provenance(source="dpiframe_core.compile"), tasks=tuple(tasks), overwrite=overwrite,
        )  # fmt: skip

    def summary(self) -> str:
        """What became of the module, in a few lines: operators by kind, and its speed beside the module's own on this CPU.

        Takes a second: both are called in turns, at float32, for one row and for 256.
        """
        lane = cpu_lane(self.graph, self.schema, self.tables, self.dense)
        times = [self._timed(lane, rows) for rows in _TIMED_ROWS]
        return module_summary(type(self.module.module).__name__, self.graph, self.tasks, self.deviation, times)

    def _timed(self, lane: CpuLane, rows: int) -> Timed:
        own = self.golden.block
        at = torch.arange(rows) % own.rows
        values = [value[at] for value in self.example.values()]
        block = RowBlock.allocate(self.schema.block_layout, rows, rows)
        block.fill([own.part(i, i + 1) for i in at.tolist()])

        def module() -> None:
            with torch.inference_mode():
                self.module(*values)

        with evaluating(self.module.module):
            return in_turns(rows, module, lambda: lane.run([block]))


def _vocabulary(name: str, given: VocabularyTable | Mapping[str, int] | Mapping[int, int]) -> VocabularyTable:
    try:
        return given if isinstance(given, VocabularyTable) else VocabularyTable.of(given)
    except BundleError as e:
        raise told(e, f"vocabularies.{name}") from None


def compile_module(
    module: nn.Module,
    schema: FeatureSchema,
    example: Mapping[str, torch.Tensor],
    *,
    call: Call = "mapping",
    output: Output = None,
    logits: bool = False,
    absent: Mapping[str, int] | None = None,
    traced: Iterator[Trace] | None = None,
) -> Compiled:
    """See `dpiframe_core.compile`. `absent`: of features of several values the id that the module gets for an absent one,
    where neither it nor the schema says so. `traced`: of `table_sizes`, of this module with these features.
    """
    for what, given, kind in (("module", module, nn.Module), ("schema", schema, FeatureSchema), ("example", example, Mapping)):
        if not isinstance(given, kind):
            raise InputError.worded(what, type(given).__name__, f"a {kind.__name__}")
    if call not in get_args(Call):
        raise InputError("call", call, f"one of {listed(get_args(Call))}")
    for where, p in [*module.named_parameters(), *module.named_buffers()]:
        if p.is_floating_point() and (p.dtype != torch.float32 or p.device.type != "cpu"):
            raise InputError(f"module.{where}", f"{p.dtype} on {p.device}", "float32 on the CPU")
    scored = Scored(module, list(example), call, output, logits)
    with evaluating(module):
        lowering, lookups, result = _lowered(traced or traces(scored, [*example.values()]), schema, example, absent)
        rows = result.count
        output_value = lowering.emitter.run(result)
        graph, dense = tidied(lowering.emitter, lookups, output_value)
        _check_used(schema, lookups)
        tables = JoinedTables({t.name: lookups.table(t.name) for t in schema.tables})
        block = example_block(schema, example, lookups.padding)
        scores = source_scores(scored, example)
        check_padded_steps(scored, schema, example, lookups.padding)
        compiled = cpu_scores(graph, schema, tables, dense, block)
        deviation = max(_deviation(compiled, scores), check_rows(scored, example, scores))
    if scores.shape[1] != rows:
        raise InputError("module output", scores.shape, f"{rows} scores a row")
    tasks = _task_names(scores.shape[1], output)
    return Compiled(schema, graph, dense, tables, Golden(block, scores), deviation, tasks, scored, example)


def table_sizes(
    module: nn.Module, schema: FeatureSchema, example: Mapping[str, torch.Tensor], call: Call, absent: Mapping[str, int]
) -> tuple[dict[str, tuple[int, int]], Iterator[Trace]]:
    """Rows and dim, as the module has them, of each table that it reads; those of the schema need only be wide enough. And what
    it is traced as, for `compile_module`: most of the time goes there.

    Raises:
        InputError: as of `compile_module`, but for sizes.
    """
    traced, again = tee(traces(Scored(module, list(example), call, None, False), [*example.values()]))
    with evaluating(module):
        _, lookups, _ = _lowered(traced, schema, example, absent)
    return {name: (lookups.rows(name), sum(p.width for p in parts)) for name, parts in lookups.parts.items()}, again


def _lowered(
    traced: Iterable[Trace], schema: FeatureSchema, example: Mapping[str, torch.Tensor], absent: Mapping[str, int] | None
) -> tuple[Lowering, Lookups, Strided]:
    """What a module reads and computes, and its scores."""
    values = raw_columns(schema, example)
    for one in traced:
        try:
            return _through(one, schema, values, absent or {})
        except InputError as error:
            refused = error
    raise refused


def _through(
    traced: Trace, schema: FeatureSchema, values: RawColumns, absent: Mapping[str, int]
) -> tuple[Lowering, Lookups, Strided]:
    complete = {"x": 0, "w": 0}
    for last in (False, True):  # the first pass finds how wide the embeddings are together, and by which ids masks go
        lookups = Lookups(schema, values.columns, absent, last)
        lowering = Lowering(traced, lookups, values.at, complete)
        result = lowering.run()
        complete, absent = lookups.widths, {**absent, **lookups.padding}
    return lowering, lookups, result


def _task_names(scores: int, output: Output) -> tuple[str, ...]:
    if scores == 1:
        return ("click",)
    if isinstance(output, Sequence) and not isinstance(output, str) and len(set(output)) == scores:
        names = tuple(key for key in output if isinstance(key, str) and _NAME.fullmatch(key))
        if len(names) == scores:
            return names
    return tuple(f"task{i}" for i in range(scores))


def _check_used(schema: FeatureSchema, lookups: Lookups) -> None:
    read = {feature for feature, _ in lookups.sources}
    unread = [f.name for f in schema.features if f.name not in read]
    if unread:
        rule = "each feature to be read: leave out those that the module is not for"
        raise InputError.worded("module", f"no lookup of {listed(unread)}", rule)


def _deviation(compiled: Floats, scores: Floats) -> float:
    off = float(np.abs(compiled - scores).max())
    if np.isnan(off):
        rule = "numbers: no integers beyond 2^24, of which float32 does not hold each, and no positions that are none"
        raise InputError.worded("compiled scores", "NaN", rule)
    if not off <= TOLERANCE:
        raise InputError("compiled scores", off, f"at most {TOLERANCE} between them and the module's own")
    return off
