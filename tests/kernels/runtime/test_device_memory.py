"""Memory of another process on a GPU: what it had is read, after its end too by who mapped it; a stale handle is refused."""

import subprocess
import sys

import pytest
import torch

from kernels.runtime.device_memory import MappedMemory

CHILD = """
import sys
import torch
from kernels.runtime.device_memory import ExportedMemory
memory = ExportedMemory(1 << 20, torch.device("cuda:0"))
memory.bytes.fill_(7)
torch.cuda.synchronize()
print(memory.handle.hex(), flush=True)
sys.stdin.read()
"""


def exporting() -> tuple["subprocess.Popen[str]", bytes]:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, bytes.fromhex(child.stdout.readline())


@pytest.mark.gpu
@pytest.mark.slow
def test_memory_is_read_while_its_process_lives_and_by_who_mapped_it_after_its_end() -> None:
    import cupy

    child, handle = exporting()
    mapped = MappedMemory(handle, torch.device("cuda:0"))
    try:
        memory = cupy.cuda.UnownedMemory(mapped.address, 1 << 20, mapped)
        view = cupy.ndarray((1 << 20,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
        assert (view.get() == 7).all()
        child.kill()
        child.wait()
        assert (view.get() == 7).all()
    finally:
        child.kill()
        child.communicate()
        mapped.close()
        mapped.close()


@pytest.mark.gpu
@pytest.mark.slow
def test_a_handle_of_a_process_that_has_ended_or_of_none_is_refused() -> None:
    child, handle = exporting()
    child.kill()
    child.communicate()
    for stale in (handle, bytes(len(handle))):
        with pytest.raises(RuntimeError, match=r"device memory: got cudaError.*, expected a handle that this device reaches"):
            MappedMemory(stale, torch.device("cuda:0"))
    assert torch.ones(3, device="cuda:0").sum() == 3  # the process's own work goes on
