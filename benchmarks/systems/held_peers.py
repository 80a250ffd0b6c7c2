"""The compiled peers of one model in one precision, several batch sizes of them held at once, ready to be timed."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch

from benchmarks.systems import systems as known
from benchmarks.systems.system import System
from benchmarks.systems.torch_calls import Store, called, captured, mapped
from benchmarks.workloads.inputs import PeerInputs
from benchmarks.workloads.workload import Form, Workload

ATEN = "ATEN"  # cuBLAS's products alone; by default Triton's beside them
_SHAPES = 64  # of one module; dynamo's own limit is 8


@dataclass(eq=False)
class HeldPeers:
    """One module for all sizes. Each is compiled for its own shape, and what is compiled stays as long as this lives.

    descent: whether Inductor tunes its own kernels by coordinate descent, as max-autotune does: a compilation a step.
    """

    w: Workload
    precision: str
    device: torch.device
    descent: bool = True
    _module: torch.nn.Module = field(init=False)
    _stream: torch.cuda.Stream | None = field(init=False)

    def __post_init__(self) -> None:
        torch._dynamo.config.recompile_limit = _SHAPES
        torch._dynamo.config.accumulated_recompile_limit = 4 * _SHAPES
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # one that can be captured
        self._module = self.w.module(Form(stacked=True, dtype=dtype, exact=self.precision == "fp32"))

    def compiled(self, rows: int, contexts: int, products: str = "") -> "CompiledPeer":
        """Compiled by Inductor, whose products are timed on the way. products: what it chooses among, "" for all it has."""
        options = dict(torch._inductor.list_mode_options("max-autotune-no-cudagraphs"))
        options["coordinate_descent_tuning"] = self.descent
        if products:
            options["max_autotune_gemm_backends"] = products
        store = torch.compile(known.storing(self._module), dynamic=False, options=options)
        inputs = PeerInputs.of(self.w.schema, rows, contexts)
        scores = torch.zeros(rows, 1, device=self.device)
        given = inputs.views(torch.zeros(inputs.nbytes, dtype=torch.uint8, device=self.device))
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode(), torch.cuda.stream(self._stream) if self._stream else nullcontext():
            store(scores, *given)
        if self._stream:
            self._stream.synchronize()
        notes: dict[str, object] = {"products": products} if products else {}
        if not self.descent:
            notes["coordinate_descent"] = False
        return CompiledPeer(store, inputs, rows, self.device, notes)


@dataclass(frozen=True, eq=False)
class CompiledPeer:
    """A compiled module of one shape: `systems` captures it in both forms that a good engineer would try."""

    store: Store
    inputs: PeerInputs
    rows: int
    device: torch.device
    notes: Mapping[str, object]

    def systems(self) -> dict[str, System]:
        """Launches on the GPU, and times the two ways to read mapped inputs."""
        given = self.store, self.inputs, self.rows, self.device
        if self.device.type == "cpu":  # there is nothing to capture
            made = {"compile-captured": called(self._scores, self.inputs, self.rows, self.device)}
        else:
            made = {"compile-captured": captured(*given), "compile-mapped": mapped(*given)}
        return {name: replace(s, notes={**s.notes, **self.notes}) for name, s in made.items()}

    def _scores(self, *given: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros(self.rows, 1, device=self.device)
        self.store(scores, *given)
        return scores
