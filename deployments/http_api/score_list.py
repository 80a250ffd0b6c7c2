"""Several requests in one body, a JSON list: its items, and the answer that has theirs in the same order.

Each is scored as if it had come alone. Knows no models; `ScoreRoute` scores them.
"""

import re
from collections.abc import Sequence

from pydantic_core import from_json, to_json

from deployments.http_api.answers import Answer, error_detail, internal_message, json_answer
from deployments.scoring.faults import NotJson, Words
from dpiframe_core.errors import DPIFrameError, InputError, TooLarge
from kernels.runtime import c_build

MOST_REQUESTS = 256  # of one body: it is read on the event loop, and others wait meanwhile
LISTED = "listed"  # the outcome of a body whose requests have outcomes of their own

_LIST = re.compile(rb"[ \t\r\n]*\[")


def is_list(body: bytes) -> bool:
    return _LIST.match(body) is not None


def items_of(body: bytes) -> list[bytes]:
    """The bodies of its requests.

    Raises:
        NotJson: the list is none.
        InputError: it is empty. TooLarge: it has more than `MOST_REQUESTS`.
    """
    functions = c_build.request_extension()
    items = None if functions is None else functions.json_items(body, MOST_REQUESTS)
    if items is None:
        try:
            items = [to_json(item) for item in from_json(body)]
        except ValueError as error:
            raise NotJson("body", Words(f"invalid JSON ({error})"), "a JSON list of requests in UTF-8") from None
    if not items:
        raise InputError("requests", [], "at least one request")
    if len(items) > MOST_REQUESTS:
        raise TooLarge("requests", Words(f"more than {MOST_REQUESTS} requests"), f"at most {MOST_REQUESTS}")
    return items


def check_rows(rows: int, most: int) -> None:
    """Raises TooLarge for more candidates, of all requests together, than `most`."""
    if rows > most:
        raise TooLarge("requests", Words(f"{rows} candidates in all"), f"at most {most}")


def fault_body(error: Exception, place: int, request_id: str) -> dict[str, object]:
    """In the place of a request's scores: why there are none, and the status that it would have had alone."""
    if isinstance(error, InputError):
        error = error.at(f"requests[{place}]" if error.where == "body" else f"requests[{place}].{error.where}")
    if isinstance(error, DPIFrameError):
        return {"error": {**error_detail(error, request_id), "status": error.status}}
    return {"error": {"code": "internal", "message": internal_message(request_id), "request_id": request_id, "status": 500}}


def list_answer(bodies: Sequence[object], request_id: str) -> Answer:
    return json_answer(200, request_id, bodies, LISTED)
