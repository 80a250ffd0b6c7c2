"""Memory of another process's GPU, read in place: while that process lives, and after it was killed; and handles of nothing."""

import os
import signal
import subprocess
import sys
from unittest import mock

import pytest
import torch

from kernels.runtime.device_memory import ExportedMemory, MappedMemory

SIZE = 1 << 20
OTHER = f"""
import sys, torch
from kernels.runtime.device_memory import ExportedMemory
memory = ExportedMemory({SIZE}, torch.device("cuda", 0))
assert not memory.bytes.any()
memory.bytes.copy_(torch.arange({SIZE}, device="cuda").to(torch.uint8))
torch.cuda.synchronize()
print(memory.handle.hex(), flush=True)
sys.stdin.read()
"""
# The other process on this GPU, or on the second one, which it sees alone, as Ray has it.
EACH = [pytest.param(None, marks=pytest.mark.gpu), pytest.param("1", marks=pytest.mark.gpu2)]


def read(memory):
    import cupy

    unowned = cupy.cuda.UnownedMemory(memory.address, SIZE, memory, device_id=0)
    return cupy.ndarray((SIZE,), cupy.uint8, cupy.cuda.MemoryPointer(unowned, 0)).get()


@pytest.mark.parametrize("gpu", EACH)
def test_memory_is_read_until_who_mapped_it_lets_go_even_if_its_process_is_killed(gpu):
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
    )  # fmt: skip
    handle = bytes.fromhex(other.stdout.readline())
    memory = MappedMemory(handle, torch.device("cuda", 0))
    want = torch.arange(SIZE).to(torch.uint8).numpy()
    assert (read(memory) == want).all()
    os.kill(other.pid, signal.SIGKILL)
    other.communicate()
    assert (read(memory) == want).all()
    memory.close()
    memory.close()
    with pytest.raises(RuntimeError, match="expected a handle that this device reaches"):
        MappedMemory(handle, torch.device("cuda", 0))


@pytest.mark.parametrize(("nbytes", "taken"), [(0, 2 << 20), (1, 2 << 20), (2 << 20, 2 << 20), ((2 << 20) + 1, 4 << 20)])
def test_it_takes_whole_pages_for_those_who_map_it(nbytes, taken, monkeypatch):
    host = torch.zeros(4 << 20, dtype=torch.uint8)
    cupy = mock.MagicMock()
    cupy.cuda.runtime.malloc.return_value = host.data_ptr()
    cupy.cuda.runtime.ipcGetMemHandle.return_value = bytes(64)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", lambda array: host[:nbytes])
    memory = ExportedMemory(nbytes, torch.device("cuda", 0))
    assert len(memory.bytes) == nbytes
    cupy.cuda.runtime.malloc.assert_called_once_with(taken)


@pytest.mark.gpu
def test_a_handle_of_nothing_is_refused_and_the_device_goes_on():
    with pytest.raises(RuntimeError, match="expected a handle that this device reaches"):
        MappedMemory(bytes(64), torch.device("cuda", 0))
    memory = ExportedMemory(0, torch.device("cuda", 0))
    assert len(memory.bytes) == 0
    memory.close()
    memory.close()
    assert int(torch.ones(3, device="cuda").sum()) == 3
