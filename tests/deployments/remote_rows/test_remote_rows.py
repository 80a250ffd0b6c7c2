"""Rows of shards are those of the tables; a shard that dies, hangs, lies or comes back is told from one that is there."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from deployments.remote_rows import row_server
from deployments.remote_rows.remote_rows import Found, RemoteRows
from deployments.remote_rows.row_server import RowServer
from deployments.remote_rows.wire import FAULT, MOST_IDS, answer, question, read_answer, read_question
from dpiframe_core.errors import InputError, Unavailable
from dpiframe_core.far_rows import rows_ahead
from dpiframe_core.far_rows.id_groups import id_groups
from dpiframe_core.far_rows.lease import leased
from dpiframe_core.far_rows.row_source import Wanted
from dpiframe_core.far_rows.rows_ahead import RowsAhead
from dpiframe_core.far_rows.spare import Spare
from dpiframe_core.features.row_block import RowBlock
from dpiframe_core.features.schema import Categorical, FeatureSchema, Identity, Table

ROWS = 5000
_KINDS = (3, torch.int8), (1, torch.float16), (5, torch.float32), (4, torch.bfloat16)
TABLES = [torch.arange(ROWS * dim).view(ROWS, dim).to(dtype) for dim, dtype in _KINDS]


class Shards:
    """Servers in this process, which die and come back; how often each was looked for."""

    def __init__(self, count: int) -> None:
        self.servers = [RowServer(TABLES, "127.0.0.1") for _ in range(count)]
        self.looked_for = [0] * count
        self.fingerprint = "f" * 64

    def find(self, i: int) -> Callable[[], Found]:
        def find() -> Found:
            self.looked_for[i] += 1
            server = self.servers[i]
            return Found("127.0.0.1", server.port, server.secret, self.fingerprint)

        return find

    def source(self, clock: Callable[[], float] = time.monotonic, timeout_s: float = 5.0) -> RemoteRows:
        finds = [self.find(i) for i in range(len(self.servers))]
        return RemoteRows(finds, TABLES, self.fingerprint, timeout_s, clock)

    def close(self) -> None:
        for server in self.servers:
            server.close()


@pytest.fixture
def shards() -> Iterator[Shards]:
    made = Shards(3)
    yield made
    made.close()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def of_shard(source: RemoteRows, shard: int) -> np.ndarray:
    return np.flatnonzero(source._shard_of(np.arange(ROWS)) == shard)


def test_rows_are_those_of_the_tables_whatever_their_dtypes_and_which_shard_has_them(shards: Shards) -> None:
    source = shards.source()
    source.await_all(5)
    ids = np.random.default_rng(0).permutation(ROWS)[:1234]
    parts = source.parts(ids)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(ids)))
    assert len(parts) == 3
    for part in parts:
        own = ids[part]
        found = source.read([Wanted(table, own) for table in (0, 1, 3, 2)])
        for table, rows in zip((0, 1, 3, 2), found, strict=True):
            assert rows.dtype == TABLES[table].dtype
            assert torch.equal(rows, TABLES[table][own])
    assert shards.looked_for == [1, 1, 1]
    source.close()


def test_neighbours_are_of_one_shard_and_shards_have_equal_shares() -> None:
    made = Shards(2)
    source = made.source()
    shares = [of_shard(source, i) for i in range(2)]
    assert abs(len(shares[0]) - len(shares[1])) <= 256
    assert shares[0][:257].tolist() == [*range(256), 512]
    made.close()


def test_a_request_asks_each_shard_once_for_all_its_tables(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    read = row_server.read_question

    def counted(link: socket.socket) -> list[Wanted] | None:
        wanted = read(link)
        if wanted:
            asked.append([table for table, _ in wanted])
        return wanted

    monkeypatch.setattr(row_server, "read_question", counted)
    schema = FeatureSchema(
        features=(Categorical(name="f", values="int", encoder=Identity(), table="t", first_order_table="w", missing_id=0),),
        tables=(Table(name="t", rows=ROWS, dim=3, dtype="int8"), Table(name="w", rows=ROWS, dim=1, dtype="float16")),
    )
    (group,) = id_groups(schema)
    spare = Spare(
        group, (10, 10), (None, None), (torch.zeros(2000, 3, dtype=torch.int8), torch.zeros(2000, 1, dtype=torch.float16))
    )
    ahead = RowsAhead([spare], schema.block_layout, shards.source())
    ids = np.random.default_rng(1).permutation(np.arange(10, ROWS))[:900]
    block = RowBlock.allocate(schema.block_layout, len(ids))
    block.column(schema.columns["f"])[:, 0] = ids
    with leased(ahead, [block]) as (ready,):
        at = ready.column(schema.columns["f"])[:, 0].astype(int) - ROWS
        assert torch.equal(spare.rows[0][at], TABLES[0][ids])
        assert torch.equal(spare.rows[1][at], TABLES[1][ids])
    assert asked == [[0, 1]] * 3
    ahead.close()


def test_a_dead_shard_fails_its_rows_alone_and_at_once_and_its_return_is_found(shards: Shards) -> None:
    clock = Clock()
    source = shards.source(clock)
    source.await_all(5)
    own = [of_shard(source, i)[:4] for i in range(3)]

    def read(shard: int) -> bool:
        (rows,) = source.read([Wanted(1, own[shard])])
        return torch.equal(rows, TABLES[1][own[shard]])

    assert all(read(i) for i in range(3))
    shards.servers[1].close()
    with pytest.raises(ConnectionError):
        read(1)
    looks = shards.looked_for[1]
    for _ in range(20):
        with pytest.raises(ConnectionError, match=r"shard 1 of rows: got Connection.*, expected it to come back"):
            read(1)
    assert shards.looked_for[1] == looks
    assert read(0)
    assert read(2)
    clock.now += 0.6
    with pytest.raises(ConnectionError):  # looked for, and not there yet
        read(1)
    assert shards.looked_for[1] == looks + 1
    shards.servers[1] = RowServer(TABLES, "127.0.0.1")  # elsewhere
    clock.now += 0.6
    assert read(1)
    source.close()


def test_while_one_thread_looks_for_a_shard_the_others_are_told_at_once(shards: Shards) -> None:
    looking, go = threading.Event(), threading.Event()

    def slow() -> Found:
        looking.set()
        assert go.wait(20)
        return shards.find(0)()

    source = RemoteRows([slow], TABLES, shards.fingerprint, 5.0)
    first = threading.Thread(target=source.read, args=([Wanted(0, np.arange(3))],))
    first.start()
    assert looking.wait(20)
    with pytest.raises(ConnectionError, match="shard 0 of rows: got no answer yet, expected it to come back"):
        source.read([Wanted(0, np.arange(3))])
    go.set()
    first.join(20)
    source.close()


def test_a_connection_that_a_restart_has_cut_is_replaced_without_a_fault(shards: Shards) -> None:
    source = shards.source()
    ids = of_shard(source, 0)[:3]
    assert torch.equal(source.read([Wanted(0, ids)])[0], TABLES[0][ids])
    with shards.servers[0]._lock:
        for link in shards.servers[0]._links:
            link.shutdown(socket.SHUT_RDWR)
    assert torch.equal(source.read([Wanted(0, ids)])[0], TABLES[0][ids])
    assert shards.looked_for[0] == 1
    source.close()


def test_a_shard_that_hangs_is_left_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = RemoteRows([lambda: Found(*silent.getsockname(), bytes(32), "f")], TABLES, "f", 0.05)
        with pytest.raises(TimeoutError):
            source.read([Wanted(0, np.arange(3))])
        with pytest.raises(ConnectionError, match=r"got TimeoutError.*, expected it to come back"):
            source.read([Wanted(0, np.arange(3))])
        with pytest.raises(Unavailable, match=r"rows of other hosts: got .*, expected all shards there"):
            source.await_all(0)


def test_rows_of_another_bundle_are_not_taken(shards: Shards) -> None:
    source = RemoteRows([shards.find(0)], TABLES, "e" * 64, 5.0)
    with pytest.raises(ConnectionError, match=f"shard 0 of rows: got bundle {'f' * 16}, expected {'e' * 16}"):
        source.read([Wanted(0, np.arange(3))])


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (Wanted(4, np.array([1])), "table: got 4, expected below 4"),
        (Wanted(1, np.array([0, ROWS])), rf"ids: got \(0, {ROWS}\), expected rows of table 1, from 0 to {ROWS - 1}"),
        (Wanted(1, np.array([-1])), r"ids: got \(-1, -1\), expected rows"),
    ],
)
def test_a_question_for_what_is_not_there_is_refused_and_the_connection_goes_on(
    shards: Shards, wanted: Wanted, said: str
) -> None:
    server = shards.servers[0]
    with socket.create_connection(("127.0.0.1", server.port), 5) as link:
        link.sendall(server.secret)
        link.sendall(question([wanted]))
        with pytest.raises(LookupError, match=said):
            read_answer(link, 0)
        link.sendall(question([Wanted(1, np.array([7]))]))
        assert bytes(read_answer(link, 2)) == TABLES[1][7].numpy().tobytes()
    source = shards.source()
    refused = Wanted(1, np.array([-256 * 3]))  # of shard 0
    for _ in range(2):  # a fault of the question is none of the shard
        with pytest.raises(LookupError, match="ids: got"):
            source.read([refused])
    source.close()


@pytest.mark.parametrize("said", [bytes(32), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(9), b"short"])
def test_who_does_not_know_the_secret_is_cut(shards: Shards, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(row_server, "_HELLO_S", 0.2)
    with socket.create_connection(("127.0.0.1", shards.servers[0].port), 5) as link:
        link.sendall(said)
        with contextlib.suppress(ConnectionError):  # what was not read makes it a reset
            assert link.recv(1) == b""


def talk(said: bytes) -> socket.socket:
    ours, theirs = socket.socketpair()
    ours.sendall(said)
    ours.close()
    return theirs


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        (question([Wanted(1, np.arange(9))])[:-1], ConnectionError, "got its end after 71 bytes, expected 72"),
        (b"\x01", ConnectionError, "got its end after 1 bytes, expected 8"),
        (b"\xff" * 8, InputError, "question: got"),
        (question([Wanted(1, np.arange(2))])[:12] + b"\x05\0\0\0" + bytes(64), InputError, "got 5, expected 2 ids"),
    ],
)
def test_what_is_no_question_ends_the_connection(said: bytes, error: type[Exception], message: str) -> None:
    with talk(said) as link, pytest.raises(error, match=message):
        read_question(link)


def test_a_question_reads_as_it_was_asked() -> None:
    asked: Sequence[Wanted] = [Wanted(3, np.array([5, 2**40])), Wanted(0, np.array([], np.int64)), Wanted(1, np.array([7]))]
    with talk(question(asked)) as link:
        found = read_question(link)
        assert found is not None
        assert [(table, ids.tolist()) for table, ids in found] == [(table, ids.tolist()) for table, ids in asked]
        assert read_question(link) is None
    with pytest.raises(InputError, match=f"rows: got {MOST_IDS + 1}, expected at most {MOST_IDS} in a question"):
        question([Wanted(0, np.zeros(MOST_IDS + 1, np.int64))])


@pytest.mark.parametrize("size", [3, 5])
def test_an_answer_of_another_size_is_none(size: int) -> None:
    with talk(b"".join(answer(0, [bytes(size)]))) as link, pytest.raises(ConnectionError, match=f"of {size} bytes, expected 4"):
        read_answer(link, 4)
    with talk(b"".join(answer(FAULT, [b"no such table"]))) as link, pytest.raises(LookupError, match="no such table"):
        read_answer(link, 4)


def test_a_server_that_is_closed_says_so_and_lets_nobody_in() -> None:
    server = RowServer(TABLES, "127.0.0.1")
    server.check()
    server.close()
    with pytest.raises(RuntimeError, match="row server: got the end of its thread"):
        server.check()
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", server.port), 1)


def test_rows_that_come_nearer_are_fetched_from_each_shard_that_answers(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_ahead, "_AT_ONCE", 100)
    source = shards.source()
    source.await_all(5)
    features = (Categorical(name="f", values="int", encoder=Identity(), table="t", missing_id=0),)
    schema = FeatureSchema(features=features, tables=(Table(name="t", rows=ROWS, dim=3),))
    (group,) = id_groups(schema)
    ahead = RowsAhead([Spare(group, (1,), (None,), (torch.zeros(4, 3, dtype=torch.int8),))], schema.block_layout, source)
    ids = np.sort(np.random.default_rng(0).permutation(ROWS)[:1500])
    there, (small, half) = ahead.fetch(ids, (0, 1))
    assert there.all()
    assert torch.equal(small, TABLES[0][ids])
    assert torch.equal(half, TABLES[1][ids])
    shards.servers[1].close()
    there, (small, _) = ahead.fetch(ids, (0, 1))
    assert (there == ~np.isin(ids, of_shard(source, 1))).all()
    assert torch.equal(small, TABLES[0][ids[there]])
    ahead.close()
