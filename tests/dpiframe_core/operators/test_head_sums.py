"""The words that a lane has for what heads behind waves add up."""

from types import SimpleNamespace

import pytest
import torch

from dpiframe_core.operators.cuda import CudaOperators
from dpiframe_core.operators.workspace import Workspace
from kernels.waves import wave as wave_module
from kernels.waves.wave_jobs import LinearJob
from tests.kernels import host_cuda

CPU = torch.device("cpu")


@pytest.mark.parametrize("widths", [(200, 24), (24, 200)])
def test_waves_of_one_name_in_several_programs_share_words_that_are_enough_for_each(widths, monkeypatch, run_folder):
    host_cuda.put_under(monkeypatch, wave_module, run_folder)
    none = torch.zeros(0, dtype=torch.int32)
    workspace, node = Workspace(None, none, none), SimpleNamespace(name="wave.1", outputs=())
    waves = []
    for width in widths:
        layer = LinearJob(torch.ones(width, 8), None, head=torch.ones(3, width))
        waves.append(wave_module.Wave([layer], torch.zeros(3), "tf32", CPU))
        operators = CudaOperators.__new__(CudaOperators)
        operators.graph, operators._kernels = SimpleNamespace(nodes=[node], widths={}), {node.name: waves[-1]}
        operators._matrices, operators._device = {}, CPU
        operators.allocate(workspace, 17)
    words = workspace.head_sums[node.name]
    assert words.dtype == torch.int64
    assert len(words) == max(17 * w.most_slots * 3 for w in waves) == 17 * 25 * 3
    assert (words == 0).all()
