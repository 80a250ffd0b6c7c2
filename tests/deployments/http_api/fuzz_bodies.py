"""Bodies that were right until some of their bytes changed: `python -m tests.deployments.http_api.fuzz_bodies --cases 100000`.

Each goes through the whole app, in this process: a status of 5xx, an answer that is no JSON, or a polite client that gets other
scores afterwards is a finding, and so is memory that grows.
"""

import argparse
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa

from tests.deployments.http_api.test_arrow_body import HEADERS as ARROW
from tests.deployments.http_api.test_arrow_body import stream, table
from tests.deployments.http_api.test_rude_clients import call
from tests.deployments.protocol.test_rest import INFER, packed, tensors
from tests.deployments.serve.test_http_app import Service, expected, request
from tests.deployments.serving_doubles import FakeEngine

_BORDERS = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
_WAYS = (0, 0, 0, 0, 1, 1, 2, 3, 4, 5, 5, 5, 5, 6, 7)  # those that keep the length get further
_SETTLED = 0.2  # of the cases: by then every cache and arena has been met
_MOST_GROWTH_MB = 24

JSON = {"content-type": "application/json"}
Seed = tuple[str, bytes, dict[str, str]]  # path, body, headers


@dataclass
class Outcome:
    """Of a run. `findings`: a line each, with the case's number, by which it can be run again."""

    statuses: Counter[int] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    grown_mb: float = 0.0
    seconds: float = 0.0

    def report(self) -> str:
        answers = ", ".join(f"{status}: {count:,}" for status, count in sorted(self.statuses.items()))
        head = f"{self.statuses.total():,} cases in {self.seconds:.0f} s; {answers}; memory grew by {self.grown_mb:.1f} MB"
        return "\n".join([head, f"{len(self.findings)} findings", *self.findings[:20]])


def seeds() -> list[Seed]:
    """Right bodies in every form, small and of some dozen rows."""
    found: list[Seed] = []
    for rows in (2, 40):
        body, headers = packed(tensors(rows))
        found.append((INFER, body, headers))
        body, headers = packed(tensors(rows), parameters={"binary_data_output": True})
        found.append((INFER, body, headers))
        ids = np.zeros((rows, 5), np.int64)
        ids[:, 0] = np.arange(rows)
        sections = {
            "context_ids": ("INT64", [1, 1], np.int64([7]).tobytes()),
            "candidate_ids": ("INT64", [rows, 5], ids.tobytes()),
            "candidate_dense": ("FP32", [rows, 2], np.ones((rows, 2), np.float32).tobytes()),
        }
        found.append((INFER, *packed(sections)))
        found.append(("/v1/score", stream(table(rows)), ARROW))
        found.append(("/v1/score", stream(table(rows), 2, pa.ipc.IpcWriteOptions(compression="lz4")), ARROW))
        found.append(("/v1/score", json.dumps(request(rows)).encode(), JSON))
        coded = table(rows, site=pa.array(["a"] * rows).dictionary_encode())
        found.append(("/v1/score", stream(coded), ARROW))
    objects = {
        "context": {"user": 1, "tags": ["x"]},
        "candidates": [{"item": i, "site": "a", "price": 1.5, "bias": 0} for i in range(4)],
    }
    found.append(("/v1/score", json.dumps(objects).encode(), JSON))
    found.append(("/v1/score", json.dumps([objects, request(2), objects]).encode(), JSON))
    return found


def changed(body: bytes, rng: random.Random) -> bytes:
    """The body with some bytes, runs of them or numbers in them replaced, taken out, put in or repeated."""
    data = bytearray(body)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        at, size = rng.randrange(len(data) + 1), rng.choice([1, 1, 2, 4, 8, 16, 64])
        match rng.choice(_WAYS):
            case 0:
                if at < len(data):
                    data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + size] = rng.randbytes(len(data[at : at + size]))
            case 2:
                del data[at : at + size]
            case 3:
                data[at:at] = rng.randbytes(size)
            case 4:
                data[at:at] = data[at : at + size] * rng.choice([1, 2, 50])
            case 5:
                width = rng.choice([1, 2, 4, 8])
                number = rng.choice(_BORDERS) % 2 ** (8 * width)
                if at + width <= len(data):
                    data[at : at + width] = number.to_bytes(width, "little")
            case 6:
                del data[at:]
            case _:
                other = rng.randrange(len(data) + 1)
                data[at : at + size], data[other : other + size] = data[other : other + size], data[at : at + size]
    return bytes(data)


def case(number: int, right: list[Seed]) -> Seed:
    rng = random.Random(number)
    path, body, headers = rng.choice(right)
    headers = dict(headers)
    length = "Inference-Header-Content-Length"
    if rng.random() < 0.1 and length in headers:
        headers[length] = str(rng.choice([rng.choice(_BORDERS), int(headers[length]) + rng.choice([-1, 1]), -1]))
    if rng.random() < 0.02:
        path = INFER if path == "/v1/score" else "/v1/score"
    return path, changed(body, rng), headers


def fuzz(cases: int, first: int = 0) -> Outcome:
    outcome, right = Outcome(), seeds()
    engine = FakeEngine()
    service = Service(engine)
    begun = time.monotonic()

    async def body(client: httpx.AsyncClient) -> None:
        before = 0.0
        for number in range(first, first + cases):
            path, content, headers = case(number, right)
            raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
            try:
                sent = await call(service.app, [{"type": "http.request", "body": content}], raw, path)
                status, answer = sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])
                outcome.statuses[status] += 1
                if status >= 500:
                    outcome.findings.append(f"case {number}: {status} {answer[:200]!r}")
                elif status != 200 and "error" not in json.loads(answer):
                    outcome.findings.append(f"case {number}: {status} without an error")
            except Exception as error:
                outcome.findings.append(f"case {number}: {error!r}")
            if number % 500 == 0:
                polite = await client.post("/v1/score", json=request(3, number % 900))
                if polite.status_code != 200 or polite.json()["scores"] != expected(3, number % 900):
                    outcome.findings.append(f"behind case {number}: a polite client got {polite.text[:200]}")
                service.seen.clear()
                engine.batches.clear()
            if number - first == int(cases * _SETTLED):
                before = resident_mb()
        outcome.grown_mb = resident_mb() - before

    service.run(body)
    outcome.seconds = time.monotonic() - begun
    if outcome.grown_mb > _MOST_GROWTH_MB:
        outcome.findings.append(f"memory: got {outcome.grown_mb:.1f} MB more, expected at most {_MOST_GROWTH_MB}")
    return outcome


def resident_mb() -> float:
    fields: list[Any] = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0]) / 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case: each number is one case")
    given = parser.parse_args()
    found = fuzz(given.cases, given.first)
    print(found.report())
    raise SystemExit(bool(found.findings))
