"""MaskNet and FinalMLP, whose gates and norms waves and chains compute: as the modules that they were compiled from."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.workloads.compiled import compiled_model
from benchmarks.workloads.modules import FinalMLP, MaskNet
from dpiframe_core.fusion.gates import SUMMED, fuse_gates
from dpiframe_core.fusion.passes import fuse
from dpiframe_core.graph.chains import group_chain
from dpiframe_core.graph.graph import JOINED
from dpiframe_core.graph.placement import matrices, place
from dpiframe_core.graph.waves import group_waves
from dpiframe_core.operators.wave_operands import chain_head, chain_links, head_operands, job_operands, jobs_of, link_operands
from kernels.dense.linear import padded
from kernels.runtime.state import STATE_WORDS, StateWord
from kernels.waves import chain as chain_module
from kernels.waves import wave as wave_module
from kernels.waves.wave_tiles import TILES
from tests.kernels import host_cuda

ROWS, FIELDS, DIM = 3, 5, 8
CPU = torch.device("cpu")


@pytest.fixture
def on_host(monkeypatch, run_folder):
    """The kernels' own code, run on the host."""
    for module in (chain_module, wave_module):
        host_cuda.put_under(monkeypatch, module, run_folder)


class Small:
    """A module, its waves, and what its lookup wrote of random rows."""

    def __init__(self, module):
        self.w = compiled_model("small", CPU, module=module, sizes=[50] * FIELDS, dim=DIM)
        self.graph = group_waves(place(fuse_gates(fuse(self.w.graph))))
        e = torch.from_numpy(np.random.default_rng(0).standard_normal((ROWS, FIELDS, DIM))).float()
        with torch.no_grad():
            self.want = torch.sigmoid(module(e))
        self.values = {}
        for node in self.graph.nodes:
            self.values |= {o: torch.zeros(ROWS, padded(self.graph.widths[o])) for o in node.outputs}
        for matrix in matrices(self.graph):
            whole = torch.zeros(ROWS, matrix.columns)
            self.values |= {value: whole[:, first:end] for value, (first, end) in matrix.spans.items()}
        self.values[self.graph.output] = torch.full((ROWS, 1), torch.nan)
        names = [f.name for f in self.w.schema.features]
        lookup = self.graph.nodes[0]
        for value, sources in zip(lookup.outputs, lookup.attrs.outputs_of_concat(), strict=True):
            columns = torch.cat([e[:, names.index(s.feature)] for s in sources], 1)
            self.values[value][:, : columns.shape[1]] = columns
        self.state = torch.zeros(STATE_WORDS, dtype=torch.int32)
        self.state[StateWord.TRUE_ROWS], self.state[StateWord.BATCH_NUMBER] = ROWS, 7
        self.done = torch.zeros(1, dtype=torch.int32)

    def by_waves(self):
        """Wave by wave; a head of its own in float64."""
        last = self.graph.nodes[-1]
        for node in self.graph.nodes[1:]:
            if node.op == JOINED or node.op == "head":
                continue
            assert node.op == "wave", node.op
            wave = wave_module.Wave(*jobs_of(node.attrs.members, self.graph, self.w.dense, {}), "fp32", CPU)
            words = torch.zeros(ROWS * 200, dtype=torch.int64)
            workspace = SimpleNamespace(head_sums={node.name: words}, done=self.done, shares={})
            head = head_operands(node, wave, self.values, ROWS, workspace)
            wave.run(job_operands(node, wave, self.values, ROWS, workspace), ROWS, head, self.state, TILES[0])
        if last.op == "head":
            weight, bias = (self.w.dense[p].double() for p in last.params)
            logit = bias
            for part, column in zip(last.inputs, last.attrs.columns, strict=True):
                width = self.graph.widths[part]
                own = torch.ones(1, width).double() if column == SUMMED else weight[:, column : column + width]
                logit = logit + self.values[part][:, :width].double() @ own.T
            return torch.sigmoid(logit).float()
        return self.values[self.graph.output]

    def by_chain(self):
        graph = group_chain(self.graph)
        assert graph is not None
        node = graph.nodes[1]
        jobs, bias = jobs_of(node.attrs.members, graph, self.w.dense, {})
        chain = chain_module.Chain(chain_links(node.attrs.members, jobs), chain_head(node.attrs.members, bias), "fp32", CPU)
        scores, words = torch.full((4, 1), torch.nan), torch.zeros(chain.words, dtype=torch.int64)
        given = link_operands(node, chain, {v: torch.cat((t, t[:1])) for v, t in self.values.items()}, 4)
        chain(given, [], 4, scores, self.done, words, self.state)
        return scores[:ROWS]


@pytest.mark.parametrize("module", [MaskNet(FIELDS, DIM, 2, 16, 2, (24, 16)), FinalMLP(FIELDS, DIM, (40, 30), 24, heads=5)])
def test_a_module_of_gates_is_its_waves_and_its_chain(on_host, module):
    model = Small(module)
    assert model.want.std() > 1e-3
    torch.testing.assert_close(model.by_chain(), model.want, rtol=0, atol=2e-6)
    torch.testing.assert_close(model.by_waves(), model.want, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("module", "launches"), [(MaskNet(FIELDS, DIM), 7), (FinalMLP(FIELDS, DIM), 8)])
def test_nothing_is_left_of_them_but_waves_and_the_head(module, launches):
    """MaskNet's and FinalMLP's 14 and 15 launches, most of them of one small operator."""
    ops = [n.op for n in Small(module).graph.nodes if n.op != JOINED]
    assert len(ops) == launches
    assert {*ops} <= {"lookup", "wave", "head"}
