"""Device memory that other processes of the host read in place, by CUDA's interprocess handles (legacy ones: no driver beyond
the two processes has to agree). Who maps memory keeps it alive: a process that ends takes nothing away from those that read.
"""

from typing import Any

import torch

_PAGE = 2 << 20  # of a length that is no multiple, whoever maps it gets small pages: their translations crowd out all others


class ExportedMemory:
    """Memory of this process on a device, zeros at first. Takes whole pages of 2 MiB.

    Attributes:
        bytes: uint8[nbytes] on the device. handle: what another process maps it by.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        import cupy

        self._runtime: Any = cupy.cuda.runtime
        with cupy.cuda.Device(device.index or 0):
            self._address = self._runtime.malloc(max(1, -(-nbytes // _PAGE)) * _PAGE)
            self.handle: bytes = bytes(self._runtime.ipcGetMemHandle(self._address))
            memory = cupy.cuda.UnownedMemory(self._address, max(1, nbytes), self)
            array = cupy.ndarray((nbytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
            array.fill(0)
            self.bytes: torch.Tensor = torch.utils.dlpack.from_dlpack(array)

    @property
    def address(self) -> int:
        return int(self._address)

    def close(self) -> None:
        """Frees it; who has mapped it reads on."""
        if self._address:
            self.bytes = torch.empty(0, dtype=torch.uint8)
            self._runtime.free(self._address)
            self._address = 0


class MappedMemory:
    """Another process's `ExportedMemory`, readable on a device of this one.

    Raises:
        RuntimeError: the handle is stale, or the two devices do not reach one another.
    """

    def __init__(self, handle: bytes, device: torch.device) -> None:
        import cupy

        self._runtime: Any = cupy.cuda.runtime
        with cupy.cuda.Device(device.index or 0):
            try:
                self.address = int(self._runtime.ipcOpenMemHandle(handle))
            except self._runtime.CUDARuntimeError as e:
                raise RuntimeError(f"device memory: got {e}, expected a handle that this device reaches") from e

    def close(self) -> None:
        """Nothing may read it any more."""
        if self.address:
            self._runtime.ipcCloseMemHandle(self.address)
            self.address = 0
