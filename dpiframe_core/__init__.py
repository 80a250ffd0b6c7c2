"""DPIFrame's core. Importing it stays light: `compile` brings torch along when it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from dpiframe_core.compiler.compiled import Compiled
    from dpiframe_core.features.schema import FeatureSchema


def compile(
    module: torch.nn.Module,
    schema: FeatureSchema,
    example: Mapping[str, torch.Tensor],
    *,
    call: Literal["mapping", "keywords", "matrix"] = "mapping",
    output: str | int | Sequence[str | int] | None = None,
    logits: bool = False,
) -> Compiled:
    """Takes a trained PyTorch module of the embeddings-then-dense kind apart into what makes a bundle; see docs/compile.md.

    Args:
        schema: the features that the module reads, and tables as large as its embeddings.
        example: feature -> at least two rows: int64[n] ids, int64[n, max_values], or float32[n] numbers ([n, 1] does, too), as
            the module takes them. They become the golden rows.
        call: how the module takes features: as one mapping by name, as keywords by name, or as one matrix float32[n, columns]
            with the features' columns side by side in the order of `example`.
        output: key or index of the scores in what the module returns, if that is more than one tensor; several for a model of
            several tasks, whose scores then lie side by side in that order.
        logits: the module returns logits; the bundle's scores are their sigmoid.

    Raises:
        InputError: what cannot be taken over, by the name of the call and its line of source; or an example that does not fit.
    """
    from dpiframe_core.compiler.compiled import compile_module

    return compile_module(module, schema, example, call=call, output=output, logits=logits)
