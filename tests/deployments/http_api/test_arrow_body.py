"""`POST /v1/score` with an Arrow IPC stream: the same scores as JSON, and streams that are larger than they look."""

import asyncio
import json
import struct
from collections.abc import Sequence
from typing import Any

import httpx
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.config import Limits
from deployments.http_api import arrow_body
from deployments.http_api.arrow_body import NotArrow, read_stream
from dpiframe_core.errors import InputError, TooLarge
from tests.deployments.serve.test_http_app import Service, expected, refused, request
from tests.deployments.serving_doubles import FakeEngine, columns

LIMITS = Limits(max_body_bytes=60_000, max_rows_per_request=100)
HEADERS = {"content-type": "application/vnd.apache.arrow.stream"}


def table(rows: int = 3, first: int = 0, **changed: Any) -> pa.Table:
    return pa.table({name: changed.get(name, values) for name, values in dict(columns(rows, first)).items()})


def stream(of: pa.Table, batches: int = 1, how: Any = None, **rest: Any) -> bytes:
    """A body. `rest`: what the metadata says beside the columns; by default the context."""
    metadata = {"request": json.dumps(rest or {"context": {"user": 1}})}
    of = of.replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, of.schema, options=how) as writer:
        for part in of.to_batches(max_chunksize=-(-of.num_rows // batches) if of.num_rows else None):
            writer.write_batch(part)
    return sink.getvalue().to_pybytes()


def run(body: Any, *engines: FakeEngine) -> Service:
    service = Service(*engines, limits=LIMITS)
    service.run(body)
    return service


async def post(client: httpx.AsyncClient, content: bytes) -> httpx.Response:
    return await client.post("/v1/score", content=content, headers=HEADERS)


@pytest.mark.parametrize("batches", [1, 3])
def test_a_stream_scores_like_json_with_lists_nulls_and_options(batches: int) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        tags = [["x"], None, ["y", "z"]]
        given_table = table(3, 5, tags=tags, site=["a", None, "é"])
        rest = {"context": {"user": 1}, "options": {"top_k": 2}, "model": "fake", "version": "7"}
        answer = await post(client, stream(given_table, batches, **rest))
        assert answer.status_code == 200, answer.text
        assert answer.json()["scores"] == expected(3, 5)
        assert answer.json()["top_k"]["indices"] == [2, 1]
        as_json = request(3, 5, **rest)
        as_json["candidates"] = {**columns(3, 5), "tags": tags, "site": ["a", None, "é"]}
        same = await client.post("/v1/score", json=as_json)
        assert {k: v for k, v in same.json().items() if k in ("scores", "top_k", "oov_count")} == {
            k: v for k, v in answer.json().items() if k in ("scores", "top_k", "oov_count")
        }

    run(body)


@pytest.mark.parametrize(
    "changed",
    [
        {"item": pa.array([0, 1, 2], pa.int8())},
        {"item": pa.array([0, 1, 2], pa.uint64())},
        {"site": pa.array(["a", "b", "c"], pa.large_string())},
        {"tags": pa.array([["a"], [], None], pa.large_list(pa.string()))},
        {"site": pa.array(["a", None, "a text beyond a view's twelve bytes"], pa.string_view())},
        {"tags": pa.array([["a"], [], None], pa.list_(pa.string_view()))},
        {"tags": pa.array([["a"], [], None], pa.large_list(pa.string_view()))},
        {"site": pa.array(["a", None, "a"]).dictionary_encode()},
        {"site": pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.uint8()), pa.array(["a", "c"], pa.string_view()))},
        {"price": pa.array([1.5, None, 1.5]).dictionary_encode(), "item": pa.array([0, 1, 2]).dictionary_encode()},
        {"price": pa.array([1.5, None, 2.5], pa.float64())},
        {"bias": pa.array([0.25] * 3, pa.float32())},
        {"site": pa.nulls(3)},
        {"tags": pa.nulls(3)},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_the_types_of_columns_that_are_read(changed: dict[str, Any]) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        answer = await post(client, stream(table(3, **changed)))
        assert answer.json()["scores"] == expected(3), answer.text

    run(body)


def test_a_context_feature_may_be_a_column_of_its_own() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        of = table(3).append_column("user", pa.array([1, 2, 3]))
        answer = await post(client, stream(of, 1, context={}))
        assert answer.json()["scores"] == expected(3), answer.text

    run(body)


def test_the_metadata_chooses_among_several_models() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        chosen = await post(client, stream(table(), 1, context={"user": 1}, model="two"))
        assert chosen.json()["model"] == "two"
        refused(await post(client, stream(table(), 1, context={"user": 1})), 422, "invalid_input")
        refused(await post(client, stream(table(), 1, context={"user": 1}, model="x")), 404, "model_not_found")

    run(body, FakeEngine(), FakeEngine(name="two"))


def compressed(codec: str) -> bytes:
    return stream(table(), how=pa.ipc.IpcWriteOptions(compression=codec))


def shared(*rows: int, text: int, columns: Sequence[str] = ("site",)) -> bytes:
    """Batches of so many rows whose columns have a dictionary of one text of `text` bytes; what is written has it once."""
    words = pa.array(["x" * text])
    schema = pa.schema([(name, pa.dictionary(pa.int8(), pa.string())) for name in columns])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for n in rows:
            site = pa.DictionaryArray.from_arrays(pa.array([0] * n, pa.int8()), words)
            writer.write_batch(pa.record_batch([site] * len(columns), schema=schema))
    return sink.getvalue().to_pybytes()


def viewed(n: int, text: int) -> bytes:
    """As many views of one text."""
    views = pa.py_buffer(struct.pack("<i4sii", text, b"xxxx", 0, 0) * n)
    site = pa.Array.from_buffers(pa.string_view(), n, [None, views, pa.py_buffer(b"x" * text)])
    return stream(pa.table({"site": site}))


def null_with_a_view() -> bytes:
    """Beside two views of ten bytes a null with one of a gigabyte; a dictionary with a null; views of a list that is null."""
    views = struct.pack("<i12s", 10, b"0123456789"), struct.pack("<i4sii", 1 << 30, b"xxxx", 7, 5)
    buffers = [b"\x05", views[0] + views[1] + views[0]]
    site = pa.Array.from_buffers(pa.string_view(), 3, list(map(pa.py_buffer, buffers)))
    words = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int8()), pa.array(["ab", None, "c"]))
    values, null = pa.array(["aaaa", "bbbb", "dd"], pa.string_view()), pa.array([True, False, False])
    tags = pa.ListArray.from_arrays(pa.array([0, 2, 3, 3], pa.int32()), values, mask=null)
    return stream(pa.table({"site": site, "word": words, "tags": tags}))


VIEWS = table(
    site=pa.array(["a" * 20, None, "a"], pa.string_view()), tags=pa.array([["b"] * 20, None, ["c"]], pa.list_(pa.string_view()))
)


def unused(buffers: int) -> bytes:
    """No row but a null; views that nothing has, in a dictionary; and as many buffers without a byte."""
    views = pa.py_buffer(struct.pack("<i4sii", 1000, b"xxxx", 0, 0) * 500)
    empty = [pa.py_buffer(b"")] * buffers
    words = pa.Array.from_buffers(pa.string_view(), 500, [None, views, pa.py_buffer(b"x" * 1000), *empty])
    return stream(pa.table({"site": pa.DictionaryArray.from_arrays(pa.array([None], pa.int8()), words)}))


@pytest.mark.parametrize(
    ("sent", "counted"),
    [
        pytest.param(shared(60, text=1000), 1000 + 4 + 60 * (4 + 1000), id="rows of a dictionary"),
        pytest.param(shared(1, 1, text=3000), 2 * (3000 + 4 + 4 + 3000), id="batches"),
        pytest.param(shared(0, 0, 0, text=3000), 3 * (3000 + 4), id="batches without rows"),
        pytest.param(shared(1, text=3000, columns=("a", "b")), 2 * (3000 + 4 + 4 + 3000), id="columns"),
        pytest.param(viewed(60, 1000), 60 * (16 + 1000) + 3 * 64, id="views"),
        pytest.param(unused(0), 500 * (16 + 1000) + 3 * 64, id="what no row has"),
        pytest.param(unused(50), 500 * (16 + 1000) + 53 * 64, id="buffers"),
        pytest.param(stream(VIEWS), (3 + 21) * 16 + 21 + 21 + 6 * 64, id="lists of views"),
        pytest.param(null_with_a_view(), (3 + 3) * 16 + 20 + 10 + 5 * 64 + (3 + 3 * 4 + 1) + 3 * 4 + 3, id="null"),
        pytest.param(stream(table()), 0, id="none"),
    ],
)
def test_what_rows_columns_and_batches_share_counts_for_each_of_them(sent: bytes, counted: int) -> None:
    read_stream(sent, 100, counted)
    if counted:
        message = rf"^candidates: got {counted} bytes, counted for each row, column and batch that has them, expected at most "
        with pytest.raises(TooLarge, match=message + str(counted - 1)):
            read_stream(sent, 100, counted - 1)


def test_what_is_shared_is_counted_before_it_is_read() -> None:
    """Else texts of a gigabyte are looked through first. Here they are no UTF-8."""
    bad = viewed(60, 1000).replace(b"x" * 1000, b"\xff" * 1000).replace(b"xxxx", b"\xff" * 4)
    with pytest.raises(NotArrow, match="UTF8"):
        read_stream(bad, 100, 10**6)
    with pytest.raises(TooLarge):
        read_stream(bad, 100, 60_000)


def test_columns_that_might_all_have_the_same_bytes_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = table(3)
    (batch,) = pa.ipc.open_stream(stream(plain))
    counted = sum(batch[name].values.nbytes + 3 * 4 if name == "tags" else batch[name].nbytes for name in plain.column_names)
    monkeypatch.setattr(arrow_body, "_LOOK_BYTES", len(stream(plain)) * len(plain.column_names))
    read_stream(stream(plain), 100, 0)
    monkeypatch.setattr(arrow_body, "_LOOK_BYTES", len(stream(plain)) * len(plain.column_names) - 1)
    read_stream(stream(plain), 100, counted)
    with pytest.raises(TooLarge, match=rf"^candidates: got {counted} bytes"):
        read_stream(stream(plain), 100, counted - 1)


def test_a_view_of_fewer_bytes_than_none_and_views_that_are_not_there_are_refused() -> None:
    views = viewed(2, 1000)
    view = struct.pack("<i4s", 1000, b"xxxx")
    assert views.count(view) == 2
    with pytest.raises(NotArrow, match="a text of fewer bytes than none"):
        read_stream(views.replace(view, struct.pack("<i4s", -(1 << 30), b"xxxx"), 1), 100, 10**6)
    with pytest.raises(NotArrow, match="too small"):  # before anything looks there
        read_stream(views.replace(struct.pack("<q", 2), struct.pack("<q", 60)), 100, 10**6)


def test_dictionaries_that_cannot_be_joined_are_told() -> None:
    kind = pa.dictionary(pa.int8(), pa.string())
    parts = [pa.array([f"{i}-{j}" for j in range(100)]).dictionary_encode().cast(kind) for i in range(2)]
    both = pa.Table.from_batches([pa.record_batch({"site": part}) for part in parts])
    with pytest.raises(InputError, match=r"^candidates: got .*, expected one record batch, or the same dictionaries$"):
        read_stream(stream(both, 2), 1000, 10**6)


def test_a_service_lets_rows_share_no_more_than_a_body_may_hold() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        most = LIMITS.max_body_bytes
        error = refused(await post(client, shared(60, text=most // 60)), 413, "too_large")
        assert error["message"].endswith(f"expected at most {most}")
        refused(await post(client, shared(58, text=most // 60)), 422, "invalid_input")  # it has one feature alone

    run(body)


def compressed_dictionary() -> bytes:
    """Of a stream that is compressed, the dictionary alone."""
    of = table(site=pa.array(["a"] * 3).dictionary_encode())
    plain, packed = stream(of), stream(of, how=pa.ipc.IpcWriteOptions(compression="zstd"))
    schema, _, rows = pa.ipc.MessageReader.open_stream(plain)
    _, words, _ = pa.ipc.MessageReader.open_stream(packed)
    assert words.type == "dictionary"
    return b"".join(message.serialize().to_pybytes() for message in (schema, words, rows))


def with_a_stray_dictionary() -> bytes:
    schema, rows = pa.ipc.MessageReader.open_stream(stream(table()))
    _, words, _ = pa.ipc.MessageReader.open_stream(shared(1, text=5))
    return b"".join(message.serialize().to_pybytes() for message in (schema, words, rows))


REFUSED: list[tuple[str, bytes, int, str]] = [
    ("empty", b"", 400, "body: got no schema, expected an Arrow IPC stream"),
    ("json", b'{"candidates": {}}', 400, "body: got "),
    ("a file", b"ARROW1\0\0" + stream(table()), 400, "body: got "),
    ("cut short", stream(table())[:-200], 400, "body: got "),
    ("lz4", compressed("lz4"), 422, "body: got a compressed batch, expected uncompressed record batches"),
    ("zstd", compressed("zstd"), 422, "body: got a compressed batch, expected uncompressed"),
    ("a compressed dictionary", compressed_dictionary(), 422, "body: got a compressed batch, expected"),
    ("a dictionary of no column", with_a_stray_dictionary(), 422, "body: got a dictionary, expected uncompressed record"),
    ("lists of dictionaries", stream(table(tags=pa.array([["a"]] * 3, pa.list_(pa.dictionary(pa.int8(), pa.string()))))), 422,
     "candidates.tags: got 'list<item: dictionary<values=string, indices=int8, ordered=0>"),
    ("a dictionary of times", stream(table(item=pa.array([1] * 3, pa.timestamp("s")).dictionary_encode())), 422,
     "candidates.item: got 'dictionary<values=timestamp"),
    ("lists of lists", stream(table(tags=[[["a"]]] * 3)), 422, "candidates.tags: got 'list<item: list"),
    ("fixed lists", stream(table(tags=pa.array([["a"]] * 3, pa.list_(pa.string(), 1)))), 422, "candidates.tags: got 'fixed"),
    ("lists of nulls", stream(table(tags=pa.array([[None]] * 3))), 422, "candidates.tags: got 'list<item: null>', expected"),
    ("times", stream(table(item=pa.array([1, 2, 3], pa.timestamp("ns")))), 422, "candidates.item: got 'timestamp"),
    ("booleans", stream(table(item=[True, False, True])), 422, "candidates.item[0]: got True, expected an integer of 64 bits"),
    ("text for numbers", stream(table(price=["1", "2", "3"])), 422, "candidates.price[0]: got '1', expected a finite"),
    ("an id out of range", stream(table(3, 998)), 422, "candidates.item[2]: got 1000, expected an id from 0 to 999"),
    ("an unknown column", stream(table().append_column("x", pa.array([1, 2, 3]))), 422,
     "candidates.x: got an unknown key, expected a feature of the model"),
    ("a column twice", stream(table().append_column("item", pa.array([1, 2, 3]))), 422, "candidates: got 'item', expected"),
    ("a long name twice", stream(pa.table([[1], [2]], ["x" * 5000] * 2)), 422,
     f"candidates: got '{'x' * 64}', expected each column once"),
    ("no column", stream(pa.table({})), 422, "candidates: got no rows or no columns, expected at least one candidate"),
    ("no row", stream(table(3).slice(0, 0)), 422, "candidates: got no rows or no columns, expected at least one candidate"),
    ("too many rows", stream(table(101)), 413, "candidates: got 101, expected at most 100"),
    ("metadata that is no json", stream(table()).replace(b'{"context"', b'["context"'), 400, "body: got invalid JSON"),
    ("an unknown key", stream(table(), 1, contexts={}), 422, "contexts: got an unknown key, expected one of model"),
    ("a context of text", stream(table(), 1, context={"user": "1"}), 422, "context.user: got '1', expected an integer or null"),
    ("an unknown feature", stream(table(), 1, context={"usr": 1}), 422, "context.usr: got an unknown key"),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "status", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_a_stream_that_breaks_a_rule_is_refused_in_words(sent: bytes, status: int, message: str) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        answer = await post(client, sent)
        error = refused(answer, status, answer.json()["error"]["code"])
        assert error["message"].startswith(message), error["message"]
        assert (await post(client, stream(table()))).json()["scores"] == expected(3)

    run(body)


def test_text_that_is_no_utf_8_and_lists_that_overlap_are_refused() -> None:
    bad = stream(table(site=["aaaa", "bbbb", "cccc"])).replace(b"bbbb", b"\xff\xffbb")
    with pytest.raises(NotArrow, match=r"^body: got .*UTF.*, expected an Arrow IPC stream$"):
        read_stream(bad, 100, 0)
    offsets = struct.pack("<4i", 0, 1, 2, 3)
    good = stream(table(tags=[["x"], ["y"], ["z"]]))
    assert offsets in good
    with pytest.raises(NotArrow):
        read_stream(good.replace(offsets, struct.pack("<4i", 0, 3, 1, 3)), 100, 0)


def test_rows_are_bounded_over_all_batches() -> None:
    of = stream(table(60)), stream(table(120), 3)
    assert len(read_stream(of[0], 100, 0).candidates["item"]) == 60
    with pytest.raises(TooLarge, match=r"^candidates: got 120, expected at most 100$"):
        read_stream(of[1], 100, 0)


def test_rows_that_are_only_claimed_are_counted_before_anything_is_made_of_them() -> None:
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"site": pa.Array.from_buffers(pa.null(), 2**31 - 1, [None])})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(TooLarge, match=r"^candidates: got 2147483647, expected at most 100$"):
        read_stream(sink.getvalue().to_pybytes(), 100, 0)


def test_many_columns_are_each_read_once() -> None:
    """So many that a search through the names of all, for each of them, would take minutes."""
    names = [str(i) for i in range(100_000)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([(name, pa.null()) for name in names])):
        pass
    assert list(read_stream(sink.getvalue().to_pybytes(), 100, 0).candidates) == names


def test_a_column_whose_name_is_not_utf_8_is_refused() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("name", pa.int64())])):
        pass
    with pytest.raises(NotArrow, match="can't decode byte 0x80"):
        read_stream(sink.getvalue().to_pybytes().replace(b"name", b"\x80ame"), 100, 0)


@given(st.data())
def test_a_damaged_stream_is_read_or_refused(data: st.DataObject) -> None:
    content = bytearray(stream(table(3), data.draw(st.integers(1, 3))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    try:
        read = read_stream(bytes(content), 100, 0)
    except InputError:
        return
    assert all(len(column) <= 100 for column in read.candidates.values())


def test_streams_of_many_clients_do_not_mix() -> None:
    async def body(client: httpx.AsyncClient) -> None:
        async def one(i: int) -> Sequence[float]:
            return list((await post(client, stream(table(1 + i % 5, i)))).json()["scores"])

        many = await asyncio.gather(*(one(i) for i in range(60)))
        assert list(many) == [expected(1 + i % 5, i) for i in range(60)]

    run(body)


@pytest.mark.parametrize("kind", [0, 9, 200])
def test_a_first_message_of_a_kind_that_nobody_knows_is_refused(kind: int) -> None:
    """pyarrow 26 reads a schema out of it all the same, at whatever address is there: the process was gone."""
    right = stream(table(2))

    def kind_of(content: bytes) -> str:
        try:
            return str(next(iter(pa.ipc.MessageReader.open_stream(content))).type)
        except (pa.ArrowException, OSError):
            return ""

    changed = (right[:i] + bytes([kind]) + right[i + 1 :] for i in range(8, 100) if right[i] == 1)
    (unknown,) = (content for content in changed if kind_of(content) == "unknown")
    for content in (unknown, right[8 + int.from_bytes(right[4:8], "little") :]):
        with pytest.raises(NotArrow, match="no schema"):
            read_stream(content, 10, 0)
