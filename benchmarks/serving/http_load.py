"""A small closed-loop HTTP client: `clients` keep-alive connections, each sends its next request when the last is answered."""

import asyncio
import time
from collections.abc import Sequence


async def _connection(host: str, port: int, requests: Sequence[bytes], stop_at: float, times: list[float]) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    i = 0
    try:
        while (begin := time.perf_counter()) < stop_at:
            writer.write(requests[i % len(requests)])
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                # HAProxy closes idle connections when it reloads, as a server may; clients open another one.
                writer.close()
                reader, writer = await asyncio.open_connection(host, port)
                continue
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"load: got {head[:60]!r}, expected status 200")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
            times.append(time.perf_counter() - begin)
            i += 1
    finally:
        writer.close()


def request_bytes(host: str, port: int, path: str, body: bytes) -> bytes:
    """A whole POST request."""
    lines = (f"POST {path} HTTP/1.1", f"Host: {host}:{port}", "Content-Type: application/json", f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def load(host: str, port: int, bodies: Sequence[bytes], clients: int, seconds: float) -> tuple[float, float, float, int]:
    """(p50 us, p99 us, requests/s, requests) after a second of warm-up."""
    requests = [request_bytes(host, port, "/v1/score", body) for body in bodies]

    async def drive(duration: float) -> tuple[list[float], float]:
        times: list[float] = []
        start = time.perf_counter()
        await asyncio.gather(*(_connection(host, port, requests, start + duration, times) for _ in range(clients)))
        return times, time.perf_counter() - start

    asyncio.run(drive(1.0))
    times, took = asyncio.run(drive(seconds))
    times.sort()
    return times[len(times) // 2] * 1e6, times[int(len(times) * 0.99)] * 1e6, len(times) / took, len(times)
