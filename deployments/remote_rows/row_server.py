"""Answers questions for rows of a bundle's tables, a thread a connection: a thread waits for its disk, the others go on."""

import contextlib
import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Sequence

import torch

from deployments.remote_rows.wire import FAULT, ROWS, SECRET_BYTES, answer, read_question, received
from dpiframe_core.errors import InputError
from dpiframe_core.far_rows.row_source import FileRows, Wanted

log = logging.getLogger(__name__)
_HELLO_S = 5.0
_BACKLOG = 128


class RowServer:
    """Listens from the start, on a port of its own.

    Args:
        tables: [rows, dim] each, in the schema's order, memory-mapped. host: the address to listen at, of this host.

    Attributes:
        port, secret: what lets others in.
    """

    def __init__(self, tables: Sequence[torch.Tensor], host: str) -> None:
        self._tables, self._files = tables, FileRows(tables)
        for table in range(len(tables)):
            self._files.advise(table)
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._listening = socket.create_server((host, 0), backlog=_BACKLOG)
        self.port: int = self._listening.getsockname()[1]
        self._lock = threading.Lock()
        self._links: set[socket.socket] = set()
        self._thread = threading.Thread(target=self._accept, name="dpiframe-rows", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises RuntimeError if nobody is let in any more."""
        if not self._thread.is_alive():
            raise RuntimeError("row server: got the end of its thread, expected it to listen")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listening.close()
        with self._lock:
            for link in self._links:
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listening.accept()
            except OSError:
                return
            with self._lock:
                self._links.add(link)
            threading.Thread(target=self._serve, args=(link,), name="dpiframe-rows-link", daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.settimeout(_HELLO_S)
            if not hmac.compare_digest(received(link, SECRET_BYTES), self.secret):
                log.warning("rows: a connection with a wrong secret was cut")
                return
            link.settimeout(None)
            while (wanted := read_question(link)) is not None:
                try:
                    parts = answer(ROWS, self._rows(wanted))
                except InputError as fault:
                    parts = answer(FAULT, [str(fault).encode()])
                for part in parts:
                    link.sendall(part)
        except (OSError, InputError) as failure:
            log.info("rows: a connection ended: %s", failure)
        finally:
            with self._lock:
                self._links.discard(link)
            link.close()

    def _rows(self, wanted: Sequence[Wanted]) -> list[memoryview]:
        for table, ids in wanted:
            if table >= len(self._tables):
                raise InputError("table", table, f"below {len(self._tables)}")
            rows = len(self._tables[table])
            if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < rows):
                raise InputError("ids", (int(ids.min()), int(ids.max())), f"rows of table {table}, from 0 to {rows - 1}")
        found = self._files.read(wanted)
        return [rows.view(torch.uint8).numpy().data.cast("B") for rows in found if rows.numel()]
