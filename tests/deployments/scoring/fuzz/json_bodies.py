"""Bodies of JSON: columns, lists of objects and lists of requests, of which some have odd values or members, or damaged bytes.

Written by hand, not by `json.dumps`: what is between two values, and how a number is spelled, is drawn too.
"""

import random

from tests.deployments.http_api.fuzz_bodies import changed

Pairs = list[tuple[bytes, bytes]]  # an object's members; a name may come twice

MOST_ROWS, MOST_OBJECTS = 64, 32

_TEXTS = [b'"a"', '"ö"'.encode(), b'"long text of a value"', b'""', b'"b"', b'"\x7f"', '"日本"'.encode(), b"null"]
_NUMBERS = [
    b"0", b"-0", b"-0.0", b"7", b"2.5", b"1e2", b"1E-2", b"2.5e+3", b"123456789012345", b"1234567890123456.7", b"0.1",
    b"4.9e-324", b"9007199254740993", b"999999999999999999", b"-999999999999999999", b"1e22", b"1e-400",
    b"0.000000000000001", b"8.41e21",
]  # fmt: skip
_GOOD = {
    b"item": _TEXTS, b"site": _TEXTS, b"strict": [b'"a"', '"ö"'.encode()],
    b"place": [b"0", b"5", b"19", b"20", b"30", b"null"], b"known": [b"4", b"5", b"6", b"null"],
    b"price": [b"0", b"-0", b"3", b"2.5", b"1e2", b"0.1"], b"wide": [*_NUMBERS, b"null"], b"step": [*_NUMBERS, b"null"],
    b"tags": [b'["a"]', b"[]", b'["a","b"]', b'["a", null]', b"null"], b"user": _TEXTS,
    b"age": [b"3", b"-0.0", b"1e2", b"null"], b"ready": [b"0", b"-0", b"7", b"19"],
    b"bag": [b"[1]", b"[0,19,2]", b"[]", b"null", b"[3, null]"],
}  # fmt: skip
_CONTEXT, _LISTS = (b"user", b"age"), (b"tags", b"bag")
_ODD = [
    b"00", b"01", b"-", b"1.", b".5", b"1e", b"1e+", b"+1", b"0x1", b"1_0", b"--1", b"1.5.2", b"NaN", b"Infinity",
    b"-Infinity", b"nan", b"1e400", b"-1e400", b"1e39", b"9223372036854775807", b"9223372036854775808",
    b"-9223372036854775809", b"18446744073709551616", b"1" * 400, b"1" * 4301, b"1." + b"3" * 70, b"0." + b"0" * 400 + b"1",
    b"true", b"false", b"null", b"nul", b"nullx", b"tru", b"[]", b"{}", b"[null]", b"[[1]]", b'{"a":1}', b'""', b'"a', b"a",
    b"'a'", b'"\\u0061"', b'"\\n"', b'"\\ud800"', b'"\\udfff\\ud800"', b'"\\ud83d\\ude00"', b'"\\x"', b'"\xff"',
    b'"\xed\xa0\x80"', b'"\xf4\x90\x80\x80"', b'"\xc0\x80"', b'"\x00"', b'"\n"', b'"\t"', b"", b"-1",
    b'"' + b"x" * 5000 + b'"', b"[" * 150 + b"]" * 150, b"[" * 250 + b"]" * 250, '"\U0001f600"'.encode(), b"1 ", b"1 1",
    b"[1,]",
]  # fmt: skip
_PIECES = [
    b"", b",", b"]", b"}", b"{", b"[", b'"', b"\\", b"0", b"-", b".", b"e", b"n", b" ", b"\xff", b"\x00", b":", b"[]", b"{}",
    b"null", b'""', b'"candidates":', b'"item":[],', b'"candidates":[],', b'"context":{},', b"\xef\xbb\xbf", b"\x0b",
    b"\xc2\xa0", b'"item":"a",', b"\\u0061",
]  # fmt: skip
_SPACES, _NO_SPACES = [b"", b" ", b"\n", b"\r\n\t "], [b"\x0b", b"\xc2\xa0", b"\x00"]
_MORE = [
    (b"options", b'{"priority":1}'), (b"options", b'{"deadline_ms":1e400}'), (b"options", b'{"top_k":2,"key":"k"}'),
    (b"model", b'"m"'), (b"version", b"null"), (b"extra", b"[1,{}]"), (b"context", b"null"), (b"context", b"{}"),
    (b"candidates", b"{}"), (b"candidates", b"[]"), (b"candidates", b"null"), (b"candidates", b'[{"item":"a"}]'),
    (b"cand\\u0069dates", b"{}"), (b"x", b'{"candidates":{"item":["b"]}}'),
]  # fmt: skip


def body(rng: random.Random) -> bytes:
    made = _request(rng) if rng.random() < 0.93 else _request_list(rng)
    if rng.random() < 0.3:
        made = _damaged(rng, made)
    if rng.random() < 0.1:
        made = changed(made, rng)
    return made


def request_list(rng: random.Random) -> bytes:
    made = _request_list(rng)
    return _damaged(rng, made) if rng.random() < 0.5 else made


def late_fault(rng: random.Random, rows: int) -> bytes:
    """A list of objects of which one of the last has another value, or none."""
    members = [(b"item", b'"a"'), (b"price", b"1.5"), (b"place", b"3")]
    listed = [_written(rng, members, b"")] * rows
    listed[rows - rng.randint(1, 9)] = _written(rng, [*members[:2], (b"place", rng.choice(_ODD))], b"")
    return b'{"candidates":[' + b",".join(listed) + b"]}"


def _request_list(rng: random.Random) -> bytes:
    space = rng.choice(_SPACES)
    return b"[" + (b"," + space).join(_request(rng) for _ in range(rng.choice((0, 1, 2, 3)))) + space + b"]"


def _request(rng: random.Random) -> bytes:
    n = rng.choice((1, 1, 2, 3, 4, 5, 8)) if rng.random() < 0.97 else rng.choice((31, 32, 33, 64, 65, 300))
    lists = rng.random() < 0.3  # or else they are the context's, as C reads no list of objects that have them
    names = [name for name in _GOOD if name not in _CONTEXT and (lists or name not in _LISTS)]
    columns = {name: rng.choices(_GOOD[name], k=n) for name in names}
    context = [(name, rng.choice(_GOOD[name])) for name in _CONTEXT]
    context += [(name, rng.choice(_GOOD[name])) for name in _LISTS if not lists]
    if rng.random() < 0.1:
        columns[b"user"] = [context.pop(0)[1]] * n
    if rng.random() < 0.1:
        context.append((b"item", columns.pop(b"item")[0]))
    for _ in range(rng.choice((0, 0, 0, 0, 1, 1, 2))):
        _spoil(rng, columns, context)
    if rng.random() < 0.5:
        candidates = _object(rng, [(name, _array(rng, values)) for name, values in columns.items()])
    else:
        rows = [[(name, values[i]) for name, values in columns.items() if i < len(values)] for i in range(n)]
        if rng.random() < 0.3:
            for row in rows:
                rng.shuffle(row)
        if rng.random() < 0.1:
            _spoil_row(rng, rng.choice(rows))
        candidates = _array(rng, [_object(rng, row, 0.02) for row in rows])
    members = [(b"context", _object(rng, context)), (b"candidates", candidates)]
    if rng.random() < 0.15:
        members.append(rng.choice(_MORE))
    rng.shuffle(members)
    return _object(rng, members)


def _spoil(rng: random.Random, columns: dict[bytes, list[bytes]], context: Pairs) -> None:
    """Another value, a value more or less, or a feature more or less."""
    name = rng.choice(list(columns))
    match rng.randrange(8):
        case 0:
            columns.pop(name)
        case 1:
            columns[name] = columns[name][rng.choice((1, -1)) :] if rng.random() < 0.5 else [*columns[name], b"null"]
        case 2:
            columns[rng.choice((b"other", b"", b"\\u0069tem", b'"', b"\xff", b"context"))] = [b"1"] * len(columns[name])
        case 3:
            context.append((rng.choice((b"user", b"place", b"other")), rng.choice(_ODD)))
        case _:
            values = columns[name]
            if values:
                values[rng.randrange(len(values))] = rng.choice(
                    _ODD if rng.random() < 0.8 else rng.choice(list(_GOOD.values()))
                )


def _spoil_row(rng: random.Random, row: Pairs) -> None:
    match rng.randrange(4):
        case 0:
            row.append((row[0][0], rng.choice(_ODD)))  # twice
        case 1:
            row.clear()
        case 2:
            row[0] = (row[0][0].replace(b"i", b"\\u0069"), row[0][1])
        case _:
            row.pop(rng.randrange(len(row)))


def _space(rng: random.Random) -> bytes:
    drawn = rng.random()
    return b"" if drawn < 0.8 else rng.choice(_SPACES if drawn < 0.998 else _NO_SPACES)


def _array(rng: random.Random, values: list[bytes]) -> bytes:
    space = _space(rng)
    return b"[" + space + (space + b"," + space).join(values) + space + b"]"


def _object(rng: random.Random, pairs: Pairs, twice: float = 0.03) -> bytes:
    if pairs and rng.random() < twice:
        pairs = [*pairs, rng.choice(pairs)]
    return _written(rng, pairs, _space(rng))


def _written(rng: random.Random, pairs: Pairs, space: bytes) -> bytes:
    return b"{" + space + (space + b"," + space).join(b'"%s"%s:%s%s' % (n, space, space, v) for n, v in pairs) + space + b"}"


def _damaged(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, size = rng.randrange(len(data) + 1), rng.choice((0, 0, 1, 1, 2, 9))
        data = data[:at] + rng.choice(_PIECES) + data[at + size :]
    return data
