"""The same bytes to C's way and to Python's: what comes back is the same to the byte, but for times, dates and fresh ids."""

import asyncio
import json
import re
from collections.abc import Callable
from unittest.mock import patch

import numpy as np

from tests.deployments.direct.test_express import Ingress, body, post

Pieces = tuple[bytes, ...]  # sent one after the other, as soon as something has come back or after a moment
Change = Callable[[bytes], bytes]

TIMES = 3  # the first of a form goes through Python, the next ones do not
MARK = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
LIVE = b'{"status":"live"}'
EXPECT = post("Expect: 100-continue").partition(b"\r\n\r\n")


def swapped(old: str, new: str) -> bytes:
    good = post()
    assert good.count(old.encode()) == 1
    return good.replace(old.encode(), new.encode())


def enveloped(change: Change) -> bytes:
    content, length = body()
    envelope = change(content[:length])
    assert envelope != content[:length]
    return post(how=(envelope + content[length:], len(envelope)))


def tensors(change: Change) -> bytes:
    content, length = body()
    return post(how=(content[:length] + change(content[length:]), length))


CHUNKED = swapped(f"\r\nContent-Length: {len(body()[0])}", "\r\nTransfer-Encoding: chunked").partition(b"\r\n\r\n")[0] + (
    b"\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body()[0]), body()[0])
)


BINARY_OUTPUT = b', "outputs": [{"name": "scores", "parameters": {"binary_data": true}}]}'


def of_contexts(count: int, *rows: int) -> bytes:
    """Three candidates with so many contexts, for so many of them each if that is said."""
    sections = [
        ("context_ids", "INT32", np.arange(count, dtype=np.int32)[:, None]),
        ("candidate_ids", "INT64", np.full((3, 5), 4)),
    ]
    sections += [("candidate_dense", "FP32", np.ones((3, 2), np.float32))]
    sections += [("context_rows", "INT64", np.array(rows, np.int64))] if rows else []
    inputs = [
        {"name": name, "datatype": kind, "shape": list(v.shape), "parameters": {"binary_data_size": v.nbytes}}
        for name, kind, v in sections
    ]
    header = json.dumps({"parameters": {"binary_data_output": True}, "inputs": inputs}).encode()
    return post(how=(header + b"".join(v.tobytes() for _, _, v in sections), len(header)))


# By what is special about them; True: C answers them from their second time on.
CASES: dict[str, tuple[bool, Pieces]] = {
    "plain": (True, (post(),)),
    "in pieces": (True, (post()[:50], post()[50:300], post()[300:])),
    "lower case": (True, (swapped("Inference-Header-Content-Length", "inference-header-content-length"),)),
    "upper case": (True, (swapped("\r\nContent-Length", "\r\nCONTENT-LENGTH"),)),
    "an empty header": (True, (post("X-Empty:"),)),
    "another media type": (False, (post("Content-Type: text/plain"),)),
    "binary media type": (True, (post("Content-Type: application/octet-stream"),)),
    "json's media type": (True, (post("content-type: application/json; charset=utf-8"),)),
    "two media types": (True, (post("Content-Type: application/json", "Content-Type: text/plain"),)),
    "two media types, the wrong one first": (False, (post("Content-Type: text/plain", "Content-Type: application/json"),)),
    "two envelope lengths": (True, (post("Inference-Header-Content-Length: 1"),)),
    "no envelope length": (False, (swapped("Inference-Header-Content-Length", "X-Nothing"),)),
    "a signed envelope length": (False, (swapped("Inference-Header-Content-Length: ", "Inference-Header-Content-Length: +"),)),
    "zeros before it": (True, (swapped("Inference-Header-Content-Length: ", "Inference-Header-Content-Length: 000"),)),
    "tabs around it": (True, (swapped("Inference-Header-Content-Length: ", "Inference-Header-Content-Length:\t \t"),)),
    "identity": (True, (post("Content-Encoding: identity"),)),
    "gzip that is none": (False, (post("Content-Encoding: gzip"),)),
    "identity, then gzip": (False, (post("Content-Encoding: identity", "Content-Encoding: gzip"),)),
    "another coding": (False, (post("Content-Encoding: br"),)),
    "accepted codings": (True, (post("Accept-Encoding: gzip", "Accept: text/html"),)),
    "a continue": (True, (EXPECT[0] + EXPECT[1], EXPECT[2])),
    "a continue that is not waited for": (True, (post("Expect: 100-continue"),)),
    "another expectation": (False, (post("Expect: more"),)),
    "close": (True, (post("Connection: close"),)),
    "close among others": (True, (post("Connection: TE, Close"),)),
    "keep-alive": (True, (post("Connection: keep-alive"),)),
    "HTTP/1.0": (True, (swapped("HTTP/1.1", "HTTP/1.0"),)),
    "HTTP/1.0 that stays": (True, (post("Connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0"),)),
    "no host": (False, (swapped("Host: a\r\n", ""),)),
    "two hosts": (False, (post("Host: b"),)),
    "two lengths": (False, (post(f"Content-Length: {len(body()[0])}"),)),
    "a request id": (True, (post("X-Request-ID: mine 1"),)),
    "no request id": (True, (post("X-Request-ID: \xe4".encode().decode("latin-1")),)),
    "too long a request id": (True, (post("X-Request-ID: " + "i" * 129),)),
    "two request ids": (True, (post("X-Request-ID: one", "x-request-id: two"),)),
    "five request ids": (False, (post(*(f"X-Request-ID: {i}" for i in range(5))),)),
    "a trace": (True, (post("traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)),
    "a token that nobody asks for": (True, (post("Authorization: Bearer t"),)),
    "another method": (False, (swapped("POST", "PUT"),)),
    "a HEAD": (False, (swapped("POST", "HEAD"),)),
    "a method in lower case": (False, (swapped("POST", "post"),)),
    "an override": (True, (post("X-HTTP-Method-Override: DELETE"),)),
    "a query": (True, (swapped("/infer", "/infer?a=b"),)),
    "an encoded path": (True, (swapped("/models", "/%6dodels"),)),
    "a slash behind": (False, (swapped("/infer", "/infer/"),)),
    "two slashes": (False, (swapped("/v2/", "//v2/"),)),
    "its version": (True, (post(version="/versions/7"),)),
    "an unknown version": (False, (post(version="/versions/8"),)),
    "an unknown model": (False, (swapped("/fake/", "/fade/"),)),
    "a priority": (True, (post(priority=-10),)),
    "too high a priority": (False, (post(priority=11),)),
    "a deadline": (True, (post(deadline_ms=30_000),)),
    "no time at all": (False, (post(deadline_ms=0),)),
    "Triton's timeout": (True, (post(timeout=30_000_000),)),
    "a key": (True, (post(key="me"),)),
    "an unknown parameter": (False, (post(sequence_id=1),)),
    "JSON asked for": (False, (post(binary_data_output=False),)),
    "an id to be escaped": (True, (enveloped(lambda e: e.replace(b'"q"', b'"\\u00e4 \\" \\n %s"')),)),
    "no id": (True, (enveloped(lambda e: e.replace(b'"id": "q", ', b"")),)),
    "blanks in the envelope": (True, (enveloped(lambda e: e.replace(b": ", b" :\t\r\n ")),)),
    "blanks behind the envelope": (True, (enveloped(lambda e: e + b"  "),)),
    "no JSON": (False, (enveloped(lambda e: e[:-1]),)),
    "a binary output": (True, (enveloped(lambda e: e[:-1] + BINARY_OUTPUT),)),
    "another output": (False, (enveloped(lambda e: e[:-1] + b', "outputs": [{"name": "other"}]}'),)),
    "too many rows": (False, (post(rows=101),)),
    "as many rows as may be": (True, (post(rows=100),)),
    "too many bytes": (False, (post(rows=500),)),
    "a byte too few": (False, (tensors(lambda t: t[:-1]),)),
    "a byte too many": (False, (tensors(lambda t: t + b"x"),)),
    "an id beyond": (False, (post(first=998),)),
    "a negative id": (False, (post(first=-1),)),
    "an id beyond 2^32": (False, (post(first=2**32),)),
    "a number that is none": (False, (post(bias=np.nan),)),
    "bytes as ids": (False, (tensors(lambda t: b"\xff" * len(t)),)),
    "a context a row": (True, (of_contexts(3),)),
    "two contexts for three rows": (False, (of_contexts(2),)),
    "contexts with their rows": (False, (of_contexts(2, 1, 2),)),
    "contexts with rows that they lack": (False, (of_contexts(2, 1, 1),)),
    "chunks": (False, (CHUNKED,)),
    "two at once": (True, (post() + post(first=9),)),
    "good and bad at once": (True, (post() + post(first=999) + post(bias=np.inf) + post(first=0),)),
    "a good one and no HTTP": (True, (post() + b"\0\r\n\r\n",)),
    "a part of the next": (True, (post() + post()[:70], post()[70:])),
}  # fmt: skip


def masked(raw: bytes, bare: bool = False) -> bytes:
    """Lengths depend on the digits of times: each answer's are checked here. `bare`: the first has none of its content."""
    out: list[bytes] = []
    while raw:
        head, blank, rest = raw.partition(b"\r\n\r\n")
        assert blank
        found = re.search(rb"\r\ncontent-length: (\d+)", head)
        length, bare = int(found[1]) if found and not bare else 0, False
        content, raw = rest[:length], rest[length:]
        if envelope := re.search(rb"inference-header-content-length: (\d+)", head):
            assert content[: int(envelope[1])].endswith(b"}")
            assert content[: int(envelope[1])].startswith(b"{")
        head = re.sub(rb"(content-length): \d+", rb"\1: N", head)
        head = re.sub(rb"\r\ndate: [^\r]{29}(?=\r|$)", b"\r\ndate: D", head)
        head = re.sub(rb"x-request-id: [0-9a-f]{16}(?=\r|$)", b"x-request-id: fresh", head)
        content = re.sub(rb'"request_id":"[0-9a-f]{16}"', b'"request_id":"fresh"', content)
        out += head, blank, re.sub(rb'"(queue|encode|device)_ms":\d+\.\d{1,3}(?=[,}])', rb'"\1_ms":T', content)
    return b"".join(out)


async def exchanged(at: Ingress, pieces: Pieces) -> bytes:
    """All that comes back up to the answer to a request behind it, or to the end of the connection."""
    client = await at.client()
    got = b""
    for piece in pieces:
        client.send(piece)
        if piece is not pieces[-1]:
            try:
                async with asyncio.timeout(0.05):
                    got += await client.reader.read(1 << 16)
            except TimeoutError:
                pass
    client.send(MARK)
    async with asyncio.timeout(20):
        while not got.endswith(LIVE):
            try:
                more = await client.reader.read(1 << 16)
            except ConnectionResetError:
                break
            if not more:
                break
            got += more
    client.writer.close()
    return got


def test_no_header_path_or_body_is_answered_or_counted_otherwise_than_by_python() -> None:
    given: dict[bool, dict[str, list[bytes]]] = {False: {}, True: {}}
    in_c: set[str] = set()
    counted: list[list[tuple[object, ...]]] = []
    for way, answers in given.items():

        async def test(at: Ingress, way: bool = way, answers: dict[str, list[bytes]] = answers) -> None:
            express = at.server._express
            if way:
                await at.learned(await at.client(), post(rows=4))
            else:
                express._off = True
            with patch.object(express._scoring, "seen", wraps=express._scoring.seen) as seen:  # of those that C has answered
                for name, (_, pieces) in CASES.items():
                    bare = name == "a HEAD"
                    answers[name] = [masked(await exchanged(at, pieces), bare) for _ in range(TIMES)]
                    express.count()
                    if seen.called:
                        in_c.add(name)
                    seen.reset_mock()

        counted.append(sorted(one[:6] for one in Ingress(way).run(test)))
    assert counted[0] == counted[1]
    for name in CASES:
        assert given[True][name] == given[False][name], name
    assert in_c == {name for name, (way, _) in CASES.items() if way}
