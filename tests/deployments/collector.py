"""A collector of spans by OTLP over HTTP, on loopback."""

import http.server
import threading
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Up within its `with`. `posted`: (path, content type, body) of each message."""

    def __enter__(self) -> Self:
        self.posted: list[tuple[str, str, bytes]] = []
        posted = self.posted

        class Posts(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                posted.append((self.path, self.headers["content-type"], body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Posts)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def spans(self) -> list[Any]:
        """All that were sent, as protobuf messages."""
        read = [ExportTraceServiceRequest.FromString(body) for _, _, body in self.posted]
        return [
            span for one in read for resource in one.resource_spans for scope in resource.scope_spans for span in scope.spans
        ]
