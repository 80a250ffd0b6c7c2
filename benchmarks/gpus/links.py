"""What each link gives for random rows, all GPUs at once: the own memory, another GPU's, the host's, read in place.

The figures of `dpiframe plan --links`.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import product
from pathlib import Path

import torch

from benchmarks.gpus.group import Group
from benchmarks.records.record import Record, record
from benchmarks.systems.cells import Failed
from benchmarks.systems.gather import UNROLLS, Gather
from benchmarks.timing import Captured
from kernels.runtime.device_memory import ExportedMemory, MappedMemory
from kernels.runtime.host_memory import DeviceReadable, SharedMemory

LINKS = ("local", "peer", "host")
_READS = 1 << 20  # a launch
_MAPPED = "benchmark-links"


def run(group: Group, spreads: Sequence[int], row_bytes: Sequence[int], failed: Failed, *, seed: int) -> Iterator[Record]:
    """A record a link, number of bytes that rows are spread over, and size of rows."""
    for link, nbytes in product(LINKS if group.size > 1 else LINKS[::2], spreads):
        try:
            with ExitStack() as kept:
                address = {"local": _local, "peer": _peer, "host": _host}[link](group, nbytes, kept)
                for size in row_bytes:
                    us = _gathered_us(group, address, nbytes // size, size, seed)
                    cell = {"gpus": group.size, "row_bytes": size, "spread_mib": round(nbytes / 2**20, 3)}
                    yield record("links", link, cell=cell, device_us=us, ns_a_row=round(us * 1e3 / _READS, 3),
                                 gb_per_s=round(_READS * size / us / 1e3, 1))  # fmt: skip
                group.wait()
        except Exception as failure:
            failed(link, failure)


def _gathered_us(group: Group, address: int, rows: int, row_bytes: int, seed: int) -> float:
    """Device time of a gather, the slowest process's, by the best of the kernel's forms."""
    generator = torch.Generator(group.device).manual_seed(seed + group.rank)
    ids = torch.randint(0, rows, (_READS,), dtype=torch.int32, device=group.device, generator=generator)
    out = torch.empty(_READS, row_bytes // 2, dtype=torch.float16, device=group.device)
    found = []
    for unroll in UNROLLS:
        gather = Gather(row_bytes, unroll)
        with closing(Captured(partial(gather.at, address, ids, out))) as graph:
            found.append(group.device_us(graph))
    return min(found)


def _local(group: Group, nbytes: int, kept: ExitStack) -> int:
    return kept.enter_context(closing(ExportedMemory(nbytes, group.device))).address


def _peer(group: Group, nbytes: int, kept: ExitStack) -> int:
    """The memory of the process behind this one, as shards map it."""
    own = kept.enter_context(closing(ExportedMemory(nbytes, group.device)))
    handles = group.bytes(own.handle)
    return kept.enter_context(closing(MappedMemory(handles[(group.rank + 1) % group.size], group.device))).address


def _host(group: Group, nbytes: int, kept: ExitStack) -> int:
    memory = kept.enter_context(SharedMemory.claim(Path("/dev/shm"), _MAPPED, nbytes))
    if memory.fresh:
        memory.publish()
    kept.enter_context(closing(DeviceReadable(memory.bytes)))
    return memory.bytes.data_ptr()
