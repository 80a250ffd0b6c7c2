"""What the direct port does with an application that fails."""

import asyncio
from typing import Any

import pytest

from deployments.direct.asgi_call import AsgiCall
from deployments.http_api.answers import Answer


def test_a_fault_is_in_the_log_under_the_request_id_that_its_answer_has(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("odd")

    async def called(headers: list[tuple[bytes, bytes]]) -> Answer:
        answered = asyncio.get_running_loop().create_future()
        AsgiCall(broken, {"method": "GET", "headers": headers}, b"", lambda answer, close: answered.set_result(answer))
        return await answered

    for headers in ([(b"x-request-id", b"my-id")], []):
        caplog.clear()
        answer = asyncio.run(called(headers))
        (record,) = caplog.records
        request_id = dict(answer.headers)[b"x-request-id"].decode()
        assert record.request_id == request_id  # type: ignore[attr-defined]
        assert request_id in record.getMessage()
        assert request_id.encode() in answer.body
