"""What the head of a request means: its route, and its headers as ASGI has them. The listener has checked its form."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote_to_bytes

from deployments.http_api.request_body import Header, Scope, header_of
from deployments.http_api.serve_bypass import asks_serve
from deployments.protocol.rest import ENVELOPE_LENGTH

DIRECT = "dpiframe.direct"  # among a scope's extensions: the request came this way
_KEPT, _KEPT_BYTES = 1024, 2048  # heads, each of at most so many bytes: a client sends the same one again and again


@dataclass(frozen=True, slots=True, eq=False)
class RequestHead:
    """Filled by `read_head`.

    Attributes:
        path: decoded, below where the service is mounted; None: it is not below it.
        headers: names in lower case, without those that the listener keeps apart.
        infer: name and version or "" of the model, if it goes there by `/v2/models/...`; score: it is a `POST /v1/score`.
        for_serve: it asks Serve for something. packed: its body is compressed. media, envelope_bytes: two headers, if they are
            there.
    """

    method: str
    target: bytes
    minor: int
    path: str | None
    headers: list[Header]
    infer: tuple[str, str] | None
    score: bool
    for_serve: bool
    packed: bool
    media: bytes | None
    envelope_bytes: str | None

    @property
    def of_protocol(self) -> bool:
        """Whether errors have the form of the Open Inference Protocol."""
        return self.path is not None and (self.path == "/v2" or self.path.startswith("/v2/"))

    def scope(self, prefix: str, headers: list[Header]) -> Scope:
        """For an ASGI application mounted at `prefix`."""
        path, _, query = self.target.partition(b"?")
        scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": f"1.{self.minor}",
            "method": self.method, "scheme": "http", "path": f"{prefix}{self.path}", "raw_path": path, "query_string": query,
            "root_path": prefix, "headers": headers, "client": None, "server": None, "extensions": {DIRECT: {}},
        }  # fmt: skip
        return scope

    def scope_at_serve(self, root: str, headers: list[Header]) -> Scope:
        """For the application that Serve has around that one, mounted at `root`, as uvicorn makes it."""
        raw = root.encode() + self.target.partition(b"?")[0]
        path = unquote_to_bytes(raw).decode("utf-8", "replace")
        return {**self.scope(root, headers), "path": path, "raw_path": raw, "extensions": {}}


def read_head(head: bytes, prefix: str) -> RequestHead:
    """`prefix`: where the service is mounted, without a slash at its end."""
    if len(head) > _KEPT_BYTES:  # of the longest ones that there may be, all different, 40 MB would be kept
        return _read(head, prefix)
    return _kept(head, prefix)


def _read(head: bytes, prefix: str) -> RequestHead:
    first, *lines = head.removesuffix(b"\r\n").split(b"\r\n")
    method, target, version = first.split(b" ")
    headers = header_lines(lines)
    whole, before = target.partition(b"?")[0], prefix.encode()
    below = whole == before or whole.startswith(before + b"/")  # as it was sent: who filters paths in front sees the same
    path = unquote_to_bytes(whole.removeprefix(before)).decode("utf-8", "replace") if below else None
    infer, steps = None, (path or "").split("/")
    if method == b"POST" and steps[:3] == ["", "v2", "models"] and steps[-1] == "infer":
        if len(steps) == 5:
            infer = steps[3], ""
        elif len(steps) == 7 and steps[4] == "versions":
            infer = steps[3], steps[5]
    packed = any(name == b"content-encoding" and value.lower() not in (b"", b"identity") for name, value in headers)
    score = method == b"POST" and path == "/v1/score"
    length = header_of(headers, ENVELOPE_LENGTH)
    return RequestHead(
        method.decode(), target, version[-1] - ord("0"), path, headers, infer, score, asks_serve(headers), packed,
        header_of(headers, b"content-type"), None if length is None else length.decode("latin-1"),
    )  # fmt: skip


_kept = lru_cache(_KEPT)(_read)


def header_lines(lines: list[bytes]) -> list[Header]:
    """Names in lower case, and values without the blanks around them."""
    split = (line.partition(b":") for line in lines)
    return [(name.lower(), value.strip(b" \t")) for name, _, value in split]
