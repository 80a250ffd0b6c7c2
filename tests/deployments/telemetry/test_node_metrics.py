"""One page of an application's metrics, of several nodes' pages."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deployments.telemetry.node_metrics import Endpoint, NodeMetrics, application_page
from dpiframe_core.errors import Unavailable

MARK = b'application="ctr"'
HEAD = "# HELP ray_dpiframe_rows_total Rows scored.\n# TYPE ray_dpiframe_rows_total counter\n"
LOST = "# HELP ray_dpiframe_unreachable_nodes Nodes whose metrics are not in this page.\n"
LOST += "# TYPE ray_dpiframe_unreachable_nodes gauge\nray_dpiframe_unreachable_nodes {}\n"


def row(replica: str, application: str = "ctr") -> str:
    return f'ray_dpiframe_rows_total{{Component="w",application="{application}",replica="{replica}"}} 3.0\n'


def test_a_family_of_several_nodes_is_described_once_and_has_the_series_of_all() -> None:
    pages = [f'{HEAD}{row("a")}ray_tasks{{x="1"}} 1\n', f"# HELP ray_nodes N\nray_nodes 2\n{HEAD}{row('b')}{row('c')}"]
    page = application_page([p.encode() for p in pages], MARK, 1)
    assert page.decode() == HEAD + row("a") + row("b") + row("c") + LOST.format(1)


def test_series_of_another_application_stay_out_and_a_label_that_quotes_ours_does_not_let_one_in() -> None:
    first = 'ray_dpiframe_rows_total{application="ctr",x="1"} 1.0\n'
    theirs = [row("a", "other"), row("a", "ctr2"), 'ray_dpiframe_rows_total{x=",application=\\"ctr\\"",y="b"} 1.0\n']
    theirs.append('ray_dpiframe_rows_total{an_application="ctr"} 1.0\n')
    page = application_page(["".join([HEAD, *theirs, first]).encode()], MARK, 0)
    assert page.decode() == HEAD + first + LOST.format(0)


def test_a_family_without_a_series_of_ours_is_left_out() -> None:
    assert application_page([(HEAD + row("a", "other")).encode()], MARK, 0).decode() == LOST.format(0)


class Node:
    """An endpoint that counts its pages. `status` and `text` may change."""

    def __init__(self, text: str) -> None:
        self.text, self.status, self.asked = text, 200, 0

    @contextmanager
    def listening(self) -> Iterator[Endpoint]:
        node = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                node.asked += self.path == "/metrics"
                self.send_response(node.status)
                self.end_headers()
                self.wfile.write(node.text.encode())

            def log_message(self, format: str, *args: object) -> None: ...

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            yield Endpoint("127.0.0.1", server.server_address[1])
            server.shutdown()
            thread.join()


def test_the_page_has_every_node_that_answers_and_counts_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not asked
    a, b = Node(HEAD + row("a")), Node(HEAD + row("b"))
    now = [0.0]

    async def pages(*nodes: Endpoint) -> list[str]:
        metrics = NodeMetrics("ctr", lambda: nodes, lambda: now[0])
        first = await asyncio.gather(*(metrics.page() for _ in range(5)))
        assert len(set(first)) == 1
        a.status = 500
        now[0] += 4.9
        kept = await metrics.page()
        now[0] += 0.2
        return [page.decode() for page in (first[0], kept, await metrics.page())]

    with a.listening() as at_a, b.listening() as at_b:
        gone = Endpoint("127.0.0.1", 1)
        first, kept, later = asyncio.run(pages(at_a, gone, at_b))
    assert first == kept == HEAD + row("a") + row("b") + LOST.format(1)
    assert later == HEAD + row("b") + LOST.format(2)
    assert (a.asked, b.asked) == (2, 2)


def test_without_any_answer_the_page_is_unavailable_and_asked_for_again_next_time() -> None:
    node = Node(HEAD + row("a"))
    node.status = 503

    async def main(at: Endpoint) -> bytes:
        metrics = NodeMetrics("ctr", lambda: [at])
        with pytest.raises(Unavailable, match="metrics: got no answer from Ray's endpoints on 1 nodes, expected one"):
            await metrics.page()
        node.status = 200
        return await metrics.page()

    with node.listening() as at:
        assert row("a") in asyncio.run(main(at)).decode()
