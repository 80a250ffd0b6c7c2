"""An application behind the direct port, on a socket of loopback."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from deployments.config import Limits
from deployments.direct.direct_server import DirectServer


@contextlib.asynccontextmanager
async def served(app: Any, limits: Limits, prefix: str = "") -> AsyncIterator[tuple[DirectServer, int]]:
    """The server and its port."""
    loop = asyncio.get_running_loop()
    server = DirectServer(app, app.state.score, app.state.infer, limits, prefix)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        listening.setblocking(False)

        def accept() -> None:
            sock, _ = listening.accept()
            if not server.adopt(sock):
                sock.close()

        loop.add_reader(listening, accept)
        try:
            yield server, listening.getsockname()[1]
        finally:
            loop.remove_reader(listening)
            server.close()
