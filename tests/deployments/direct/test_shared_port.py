"""Processes of a node that share the direct port. Each here is a server with a mailbox, which is all they know of another."""

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest

from deployments.config import Limits
from deployments.direct import shared_port
from deployments.direct.direct_server import DirectServer
from deployments.direct.shared_port import SharedPort, leave, open_port
from deployments.serve.host import free_ports
from dpiframe_core.errors import ConfigError
from tests.deployments.serve.test_http_app import Service, expected, request
from tests.deployments.serving_doubles import until


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "direct", False)


class Node:
    """Servers that come and go at one port."""

    def __init__(self, service: Service) -> None:
        self.service, self.place = service, f"\0dpiframe-test-{secrets.token_hex(4)}"
        (self.port,) = free_ports(1)

    async def arrive(self) -> tuple[DirectServer, SharedPort]:
        state = self.service.app.state
        server = DirectServer(self.service.app, state.score, state.infer, Limits())
        return server, await open_port(server, self.place, "127.0.0.1", self.port)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=20) as client:
            yield client

    async def scored(self, client: httpx.AsyncClient) -> None:
        assert (await client.post("/v1/score", content=json.dumps(request(2)))).json()["scores"] == expected(2)


def on_node(body: Callable[[Node], Awaitable[None]]) -> None:
    service = Service()

    async def main(_: httpx.AsyncClient) -> None:
        await body(Node(service))

    service.run(main)


def test_clients_are_spread_evenly_and_a_newcomer_gets_the_next_ones() -> None:
    async def body(node: Node) -> None:
        servers = [await node.arrive() for _ in range(3)]
        async with contextlib.AsyncExitStack() as stack:
            for count in range(1, 10):
                await node.scored(await stack.enter_async_context(node.client()))
                assert sorted(server.connections for server, _ in servers) == [(count + i) // 3 for i in range(3)]
            servers.append(await node.arrive())
            for _ in range(3):
                await node.scored(await stack.enter_async_context(node.client()))
            assert [server.connections for server, _ in servers] == [3, 3, 3, 3]
        for _, shared in servers:
            await shared.close(5)

    on_node(body)


def test_connections_that_nobody_has_accepted_outlive_the_process_that_leaves_or_dies() -> None:
    async def body(node: Node) -> None:
        (_, leaving), (server, staying) = await node.arrive(), await node.arrive()
        for shared in (leaving, staying):
            asyncio.get_running_loop().remove_reader(shared._listening)  # type: ignore[arg-type]  # both are busy
        waiting = [socket.create_connection(("127.0.0.1", node.port)) for _ in range(4)]
        await leaving.close(5)
        staying._accept_again()
        await until(lambda: server.connections == 4)
        async with node.client() as client:
            await node.scored(client)
        for sock in waiting:
            sock.close()
        await staying.close(5)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", node.port))

    on_node(body)


def test_a_process_that_was_killed_is_given_no_clients() -> None:
    async def body(node: Node) -> None:
        (_, killed), (server, living) = await node.arrive(), await node.arrive()
        asyncio.get_running_loop().remove_reader(killed._mail)
        asyncio.get_running_loop().remove_reader(killed._listening)  # type: ignore[arg-type]
        killed._listening.close()  # type: ignore[union-attr]
        killed._mail.close()  # what the end of a process does, and its count stays as it was
        async with node.client() as one, node.client() as two:
            await node.scored(one)
            await node.scored(two)
            assert server.connections == 2
        await living.close(5)

    on_node(body)


def test_all_of_a_place_leave_when_they_are_told_and_answer_what_they_have() -> None:
    async def body(node: Node) -> None:
        servers = [await node.arrive() for _ in range(2)]
        (engine,) = node.service.engines
        engine.go.clear()
        async with node.client() as one, node.client() as two:
            asked = [asyncio.create_task(node.scored(client)) for client in (one, two)]
            await until(lambda: [server.connections for server, _ in servers] == [1, 1] and bool(engine.batches))
            left = asyncio.create_task(asyncio.to_thread(leave, node.place, 20))
            await until(lambda: all(shared._listening is None for _, shared in servers))
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", node.port))
            assert not left.done()
            engine.go.set()
            await asyncio.gather(*asked)
        await left
        for _, shared in servers:
            await shared.close(0)  # as a replica does at its end, whoever told it before

    on_node(body)


def test_a_place_that_nobody_is_at_is_left_at_once_and_one_that_stalls_after_the_time_given() -> None:
    async def body(node: Node) -> None:
        begun = asyncio.get_running_loop().time()
        leave(node.place, 20)
        _, shared = await node.arrive()
        leave(node.place, 0.1)  # on its event loop, which therefore stands still
        assert asyncio.get_running_loop().time() - begun < 10
        await shared.close(5)

    on_node(body)


def test_a_port_that_somebody_else_has_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_port, "_PATIENCE_S", 0.2)

    async def body(node: Node) -> None:
        refusal = pytest.raises(ConfigError, match=rf"^http.direct_port: got {node.port} \(.*\), expected a free port$")
        with socket.create_server(("127.0.0.1", node.port)), refusal:
            await node.arrive()

    on_node(body)


def test_messages_of_other_users_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(node: Node) -> None:
        _, shared = await node.arrive()
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        stranger.bind(shared_port._name(node.place, 7))
        stranger.setblocking(False)
        monkeypatch.setattr(shared_port.os, "getuid", lambda: 4_000_000)
        stranger.sendto(b"?", shared_port._name(node.place, 0))
        await asyncio.sleep(0.1)
        with pytest.raises(BlockingIOError):
            stranger.recv(1)
        monkeypatch.undo()
        stranger.sendto(b"?", shared_port._name(node.place, 0))
        await asyncio.sleep(0.1)
        what, fds, *_ = socket.recv_fds(stranger, 1, 2)
        assert (what, len(fds)) == (b"!", 2)
        for fd in fds:
            socket.close(fd)
        stranger.close()
        await shared.close(5)

    on_node(body)


def test_without_a_descriptor_it_waits_and_then_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(node: Node) -> None:
        _, shared = await node.arrive()
        listening, refusals = shared._listening, 2
        assert listening is not None

        class Full:
            def accept(self) -> tuple[socket.socket, object]:
                nonlocal refusals
                refusals -= 1
                if refusals < 0:
                    return listening.accept()
                raise OSError(24, "Too many open files")

            def __getattr__(self, name: str) -> object:
                return getattr(listening, name)

        monkeypatch.setattr(shared, "_listening", Full())
        async with node.client() as client:
            await node.scored(client)
        assert refusals < 0
        await shared.close(5)

    on_node(body)
