"""A full disk under the log: what cannot be written is lost, and nobody who asks for scores notices."""

import json
import subprocess
import sys

import pytest

SERVING = """
import asyncio, faulthandler, json, logging
from deployments.telemetry.log_form import log_to_stderr
from tests.deployments.serve.test_http_app import Service, request
from tests.deployments.serving_doubles import FakeEngine

log_to_stderr("debug", "FORM")
engine, seen = FakeEngine(), []

async def body(client):
    seen.append((await client.post("/v1/score", json=request(2))).status_code)
    engine.fault = RuntimeError("the device failed")  # its traceback goes to the log
    seen.append((await client.post("/v1/score", json=request(2))).status_code)
    engine.fault = None
    for _ in range(50):
        logging.getLogger("deployments").error("a long line " * 1000)
    seen.append((await client.post("/v1/score", json=request(2))).status_code)
    faulthandler.dump_traceback(2)  # the watchdog's last words

Service(engine).run(body)
print(json.dumps(seen))
"""


@pytest.mark.bulk
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_that_cannot_be_written_costs_no_request(form: str) -> None:
    with open("/dev/full", "wb") as full:  # every write of it fails: no space left on device
        ran = subprocess.run(
            [sys.executable, "-c", SERVING.replace("FORM", form)],
            stdout=subprocess.PIPE, stderr=full, timeout=100, check=False,
        )  # fmt: skip
    assert json.loads(ran.stdout) == [200, 503, 200]
