"""An application behind the direct port, on a socket of loopback or of a file."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from deployments.config import Limits
from deployments.direct.direct_server import DirectServer
from deployments.host_sockets.listening import SocketFile


@contextlib.asynccontextmanager
async def served(
    app: Any, limits: Limits, prefix: str = "", path: Path | None = None
) -> AsyncIterator[tuple[DirectServer, int]]:
    """The server and its port; 0 if it is a Unix socket at `path`."""
    loop = asyncio.get_running_loop()
    server = DirectServer(app, app.state.score, app.state.infer, limits, prefix)
    opened = socket.create_server(("127.0.0.1", 0), backlog=1024) if path is None else SocketFile(str(path)).listen()
    with opened as listening:
        listening.setblocking(False)

        def accept() -> None:
            for client in server.accept(listening.fileno(), 16):
                if not server.adopt([client]):
                    os.close(client)

        loop.add_reader(listening, accept)
        try:
            yield server, 0 if path is not None else listening.getsockname()[1]
        finally:
            loop.remove_reader(listening)
            server.close()
