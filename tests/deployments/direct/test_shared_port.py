"""Processes of a node that share the direct port. Each here is a server with a mailbox, which is all they know of another."""

import asyncio
import contextlib
import grp
import json
import os
import secrets
import select
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from deployments.config import Limits
from deployments.direct import direct_server, listener, shared_port
from deployments.direct.direct_server import DirectServer
from deployments.direct.shared_port import SharedPort, leave, open_port, shares
from deployments.fanin import handshake
from deployments.host_sockets import mailbox
from deployments.host_sockets.listening import Place, Port, SocketFile
from dpiframe_core.errors import ConfigError
from tests.deployments.own_ports import own_port
from tests.deployments.serve.test_http_app import Service, expected, request
from tests.deployments.serving_doubles import until


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "direct", False)


class Node:
    """Servers that come and go at one port."""

    def __init__(self, service: Service) -> None:
        self.service, self.place = service, f"\0dpiframe-test-{secrets.token_hex(4)}"
        self.port = own_port()
        self.places: list[Place] = [Port("127.0.0.1", self.port)]
        self.kept: list[socket.socket] = []

    async def arrive(self) -> tuple[DirectServer, SharedPort]:
        state = self.service.app.state
        server = DirectServer(self.service.app, state.score, state.infer, Limits())
        return server, await open_port(server, self.place, self.places)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """At its first place."""
        [place, *_] = self.places
        transport = httpx.AsyncHTTPTransport(uds=place.path) if isinstance(place, SocketFile) else None
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=20, transport=transport) as client:
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


def test_clients_that_come_at_once_are_spread_evenly_and_answered() -> None:
    async def body(node: Node) -> None:
        servers = [await node.arrive() for _ in range(3)]
        for count in (1, 2):  # the second time beside those that are here
            waiting = [socket.create_connection(("127.0.0.1", node.port)) for _ in range(150)]
            await until(lambda count=count: sum(server.connections for server, _ in servers) == 150 * count)
            assert [server.connections for server, _ in servers] == pytest.approx([50 * count] * 3, abs=2)
            for sock in waiting:
                sock.sendall(b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n")
            for sock in waiting:
                sock.setblocking(False)
                answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 4096), 20)
                assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            node.kept += waiting
        for sock in node.kept:
            sock.close()
        for _, shared in servers:
            await shared.close(5)

    on_node(body)


def test_each_of_many_goes_to_who_has_the_fewest_by_then_and_ties_are_for_who_accepts() -> None:
    assert shares(range(6), [(2, 0), (0, 1), (3, 2)], 2) == {1: [0, 1, 3], 0: [2, 5], 2: [4]}
    assert shares(range(3), [(1, 0), (1, 1), (1, 2)], 1) == {1: [0], 0: [1], 2: [2]}
    assert shares([], [(1, 0)], 0) == {}


def test_connections_that_nobody_has_accepted_outlive_the_process_that_leaves_or_dies() -> None:
    async def body(node: Node) -> None:
        (_, leaving), (server, staying) = await node.arrive(), await node.arrive()
        for shared in (leaving, staying):
            for listening in shared._listening.values():  # both are busy
                asyncio.get_running_loop().remove_reader(listening)
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
        end(killed)
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
            dispatcher = node.service.batchers["fake"].dispatcher
            await until(lambda: dispatcher.inflight_rows + dispatcher.queued_rows == 4)  # both were read
            assert [server.connections for server, _ in servers] == [1, 1]
            left = asyncio.create_task(asyncio.to_thread(leave, node.place, 20))
            await until(lambda: not any(shared._listening for _, shared in servers))
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


def test_who_comes_while_all_are_told_to_leave_leaves_too_and_what_is_begun_is_answered() -> None:
    """A starting process found the port free, and opened it again: it was let alone, as nobody had been there at first."""

    async def body(node: Node) -> None:
        loop = asyncio.get_running_loop()
        server, shared = await node.arrive()
        reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
        text = json.dumps(request(2)).encode()
        head = f"POST /v1/score HTTP/1.1\r\nhost: a\r\ncontent-length: {len(text)}\r\n\r\n".encode()
        writer.write(head + text[:10])
        await until(lambda: server.connections == 1)
        leaving = loop.run_in_executor(None, leave, node.place, 20)
        await until(lambda: not shared._listening)
        newcomer, late = await node.arrive()
        await until(lambda: not late._listening)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", node.port)
        assert not leaving.done()
        writer.write(text[10:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await leaving
        writer.close()
        assert (server.connections, newcomer.connections) == (0, 0)

    on_node(body)


def test_who_is_told_to_leave_while_it_waits_for_the_port_opens_none() -> None:
    async def body(node: Node) -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", node.port)):
            arriving = loop.create_task(node.arrive())
            await asyncio.sleep(0.05)  # it has asked
            await loop.run_in_executor(None, leave, node.place, 20)
        _, shared = await arriving
        assert not shared._listening
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", node.port)

    on_node(body)


def test_a_port_that_somebody_else_has_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_port, "_PATIENCE_S", 0.2)

    async def body(node: Node) -> None:
        refusal = pytest.raises(ConfigError, match=rf"^http.direct_port: got {node.port} \(.*\), expected a free port$")
        with socket.create_server(("127.0.0.1", node.port)), refusal:
            await node.arrive()

    on_node(body)


def end(killed: SharedPort) -> None:
    """What the end of a process does: its sockets vanish, and its count stays as it was."""
    for listening in killed._listening.values():
        asyncio.get_running_loop().remove_reader(listening)
        listening.close()
    killed._mail.close()


def test_a_connection_of_another_user_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(node: Node) -> None:
        _, shared = await node.arrive()

        async def answer() -> tuple[bytes, int]:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asker:
                asker.connect(mailbox._name(node.place, 0))
                asker.send(b"?")
                await until(lambda: bool(select.select([asker], [], [], 0)[0]))
                what, fds, *_ = socket.recv_fds(asker, 1, mailbox.MOST_SOCKETS, socket.MSG_DONTWAIT)
                for fd in fds:
                    socket.close(fd)
                return what, len(fds)

        assert await answer() == (b"!", 2)
        monkeypatch.setattr(handshake.os, "getuid", lambda: 4_000_000)  # whoever asks is not of this user
        with pytest.raises(ConnectionError):
            await answer()
        await shared.close(5)

    on_node(body)


def test_who_takes_the_name_of_a_killed_process_is_given_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(node: Node) -> None:
        (_, killed), (server, living) = await node.arrive(), await node.arrive()
        end(killed)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken:
            taken.bind(mailbox._name(node.place, 0))
            taken.listen()
            taken.setblocking(False)
            monkeypatch.setattr(handshake.os, "getuid", lambda: 4_000_000)  # whoever is there is not of this user
            async with node.client() as one, node.client() as two:
                await node.scored(one)
                await node.scored(two)
                assert server.connections == 2
            with contextlib.suppress(BlockingIOError):
                caller, _ = taken.accept()
                with caller:
                    caller.settimeout(1)
                    assert socket.recv_fds(caller, 1, 4)[:2] == (b"", [])
        await living.close(5)

    on_node(body)


def test_a_process_whose_clients_have_left_is_given_the_next_ones() -> None:
    async def body(node: Node) -> None:
        (one, _), (two, _) = servers = [await node.arrive() for _ in range(2)]
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(node.client()) for _ in range(6)]
            owners = []
            for client in clients:
                before = one.connections
                await node.scored(client)
                owners.append(one if one.connections > before else two)
            assert (one.connections, two.connections) == (3, 3)
            for client, owner in zip(clients, owners, strict=True):
                if owner is one:
                    await client.aclose()
            await until(lambda: one.connections == 0)
            for _ in range(3):  # no connection was placed since they left
                await node.scored(await stack.enter_async_context(node.client()))
            assert (one.connections, two.connections) == (3, 3)
        for _, shared in servers:
            await shared.close(5)

    on_node(body)


def test_processes_share_a_port_and_a_socket_file_of_their_user(tmp_path: Path) -> None:
    path = tmp_path / "score.sock"

    async def body(node: Node) -> None:
        node.places.insert(0, SocketFile(str(path)))
        with socket.socket(socket.AF_UNIX) as ended:  # a process that was killed has left its file
            ended.bind(str(path))
            ended.listen()
        servers = [await node.arrive() for _ in range(3)]
        assert path.stat().st_mode & 0o777 == 0o600
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(6):
                await node.scored(await stack.enter_async_context(node.client()))
                await node.scored(await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{node.port}")))
            assert [server.connections for server, _ in servers] == [4, 4, 4]
            for _, shared in servers[:2]:
                await shared.close(5)
            async with node.client() as client:
                await node.scored(client)
        await servers[2][1].close(5)
        assert not path.exists()

    on_node(body)


def test_a_socket_file_may_be_a_groups_too(tmp_path: Path) -> None:
    path, group = tmp_path / "score.sock", grp.getgrgid(os.getgid()).gr_name
    with SocketFile(str(path), group).listen():
        assert (path.stat().st_mode & 0o777, path.stat().st_gid) == (0o660, os.getgid())
    with pytest.raises(ConfigError, match=r"^http.direct_socket_group: got 'no-such', expected a group of this host$"):
        SocketFile(str(path), "no-such").listen()


def test_a_path_that_something_else_has_is_refused_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_port, "_PATIENCE_S", 0.2)
    path, live = tmp_path / "file", tmp_path / "live.sock"
    path.write_text("mine")

    async def body(node: Node) -> None:
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(live))
            other.listen()
            for place in (path, live, tmp_path / "none" / "score.sock"):
                node.places = [SocketFile(str(place))]
                with pytest.raises(ConfigError, match=rf"^http.direct_socket: got {place} \(.*\), expected a path below"):
                    await node.arrive()
                with pytest.raises(ConfigError, match=rf"^http.direct_socket: got {place} \(.*\), expected a path below"):
                    SocketFile(str(place)).check()
            SocketFile(str(tmp_path / "free.sock")).check()
            assert not (tmp_path / "free.sock").exists()
            assert path.read_text() == "mine"
            assert live.exists()

    on_node(body)


def test_a_full_process_has_newcomers_wait_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = listener.open_listener
    monkeypatch.setattr(direct_server, "open_listener", lambda limits, most: opened(limits, 2))

    async def body(node: Node) -> None:
        server, shared = await node.arrive()
        async with node.client() as first, node.client() as third:
            async with node.client() as second:
                await node.scored(first)
                await node.scored(second)
                waits = asyncio.create_task(node.scored(third))
                await asyncio.sleep(0.5)
                assert not waits.done()
                assert server.connections == 2
            await waits
            await node.scored(first)
        await shared.close(5)

    on_node(body)
    wanted = "direct port: got as many connections as may be, expected room for one more: newcomers wait"
    assert [record.getMessage() for record in caplog.records if "direct port" in record.getMessage()] == [wanted]


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "most"),
    [
        (1024, 524_288, 4608, 4096),
        (1024, -1, 4608, 4096),
        (1024, 1024, 1024, 512),
        (1024, 2048, 2048, 1536),
        (256, 256, 256, 128),
        (65_536, 65_536, 65_536, 4096),
        (-1, -1, -1, 4096),
    ],
)
def test_clients_leave_descriptors_for_all_else(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int, most: int
) -> None:
    limit = [(soft, hard)]
    monkeypatch.setattr(listener.resource, "getrlimit", lambda _: limit[-1])
    monkeypatch.setattr(listener.resource, "setrlimit", lambda _, wanted: limit.append(wanted))
    assert listener.most_connections() == most
    assert limit[-1] == (raised, hard)


def test_mail_that_finds_no_descriptor_waits_without_a_spin_and_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        read, tried = [], list[float]()
        box = mailbox.Mailbox(f"\0dpiframe-test-{secrets.token_hex(4)}", lambda _, what, fds: read.append(what))
        own = box._listening

        class Full:
            def accept(self) -> tuple[socket.socket, object]:
                tried.append(time.monotonic())
                if len(tried) > 2:
                    return own.accept()
                raise OSError(24, "Too many open files")

            def __getattr__(self, name: str) -> object:
                return getattr(own, name)

        monkeypatch.setattr(box, "_listening", Full())
        assert mailbox.posted(box._place, box.slot, b".")
        await until(lambda: read == [b"."])
        first, second, third = tried[:3]
        assert min(second - first, third - second) >= 0.09
        box.close()

    asyncio.run(body())


def test_without_a_descriptor_it_waits_and_then_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(node: Node) -> None:
        server, shared = await node.arrive()
        accept, refusals = server.accept, 2

        def full(listening: int, most: int) -> list[int]:
            nonlocal refusals
            refusals -= 1
            if refusals < 0:
                return accept(listening, most)
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(server, "accept", full)
        async with node.client() as client:
            await node.scored(client)
        assert refusals < 0
        await shared.close(5)

    on_node(body)
