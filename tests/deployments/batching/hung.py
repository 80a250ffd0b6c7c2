"""A process whose device hangs in its second run, for tests: `python -m tests.deployments.batching.hung cpu|cuda SECONDS`."""

import asyncio
import ctypes
import sys
import time

from deployments.batching.batcher import RowBatcher
from deployments.batching.lost_device import end_when_lost
from dpiframe_core.errors import Unavailable
from tests.deployments.serving_doubles import FakeDevice, numbered


def spin() -> None:
    """A kernel that never ends, and a wait for it."""
    import cupy

    source = 'extern "C" __global__ void spin(volatile int* go) { while (!*go) {} }'
    cupy.RawKernel(source, "spin")((1,), (1,), (cupy.zeros(1, cupy.int32),))
    cupy.cuda.get_current_stream().synchronize()


async def main(device: str, max_run_s: float) -> None:
    healthy = FakeDevice()

    def run(blocks):  # type: ignore[no-untyped-def]
        if healthy.batches:
            spin() if device == "cuda" else ctypes.CDLL(None).pause()
        return healthy(blocks)

    batcher = RowBatcher(run, max_batch_rows=4, lanes=1, max_queued_rows=100)
    end_when_lost(batcher.dispatcher, lambda: None, max_run_s, batcher.fail)
    await batcher.submit(numbered(1, 1))
    print("scored", time.monotonic(), flush=True)
    try:
        await batcher.submit(numbered(2, 4))
    except Unavailable as error:
        print(error, flush=True)
    await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
