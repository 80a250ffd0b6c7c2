"""Representatives of the sets of compile-time constants that the kernels are built with; the compile test walks this table."""

from dataclasses import replace

from kernels.waves.wave_tiles import CLUSTERED_TILES, CROSSED_TILES, EXACT_TILES, LONE_TILES, TILES, WIDE_TILES

# The Criteo lookup: 39 ids, 16 columns each, first-order weights; all float32, or int8 rows.
_LOOKUP = {"CONTEXT_BYTES": "0", "CANDIDATE_BYTES": "76", "CONTEXT_NUMBERS": "0", "CANDIDATE_NUMBERS": "0", "TOTALS": "39"}
_LOOKUP |= {"TIERS": "0"}
_LOOKUP |= {"NARROW": "0", "MOST": "1", "MASKS": "0", "LARGEST": "0"}
_LOOKUP |= {"GROUP": "8", "UNIT_THREADS": "320", "TOTAL_THREADS": "64", "BLOCKS": "2"}
_LOOKUP |= {"OUT_FACTOR": "1.0f", "AHEAD": "0", "PARTS": "0", "SINGLES": "0", "JOINS": "0", "TEAM": "1", "FLIGHT": "8"}
_LOOKUP |= {"EVICT_FIRST": "0"}
_LOOKUP |= {"FIRST_ONCE": "UNITS", "SHARED": "{0,0}", "ROW_WORDS": "0", "CARRIED": "0"}
_LOOKUP |= {"HISTORY_PARTS": "0", "PARTS_OF_HISTORY": "{}", "MOST_PART_WORDS": "0"}
_FLOAT = {"ID": "unsigned", "OUT": "float", "UNITS": "156", "VEC": "4", "DTYPES": "1", "TOTAL_DTYPES": "1"}
_INT8 = {"ID": "unsigned long long", "OUT": "bf16", "UNITS": "78", "VEC": "8", "DTYPES": "8", "TOTAL_DTYPES": "8"}
_FP8 = {"OUT": "fp8", "OUT_FACTOR": "0.25f"}

_WAVE = {"TASKS": "2", "DOTS": "7", "LAYERS": "6", "HEAD": "1", "PER_ROW": "3", "CROSSED": "3", "KINDS": "252"}
_WAVE |= {"SHARES": "0"}
_CHAIN = {name: value for name, value in _WAVE.items() if name not in ("HEAD", "SHARES")}
_CHAIN |= {"FIELDS": "0", "DIM": "1", "KEEP": "0", "DIAGONAL": "0", "MIXES": "0"}
_TILES = (TILES[0].constants, TILES[1].constants, TILES[-1].constants)
_WIDE_TILES = (WIDE_TILES[0].constants, WIDE_TILES[-1].constants, CROSSED_TILES[0].constants)

_CLUSTERED = tuple(replace(tile, cluster=2).constants for tile in (CLUSTERED_TILES[1], CLUSTERED_TILES[-1]))

_DOT = {"FIELDS": "27", "KEEP": "10", "DIAGONAL": "0"}
_TOWER = {"IN": "13", "LAYERS": "3", "WIDTHS": "512,256,64", "KINDS": "1,1,1", "DEPTH": "8"}
_CIN = {"M": "39", "DIM": "16", "NF": "8", "ACTIVATION": "1"}
_WIDE_CIN = {"DIM": "16", "ACTIVATION": "1", "WIDTH": "128", "STAGES": "4"}
_ATTENTION = {"LENGTH": "50", "DIMS": "32,16", "QUERIES": "0,32", "KEYS": "48,1648", "POOLED": "48,80", "PARTS": "2"}
_ATTENTION |= {"DIM": "48", "MASK": "2448", "KEPT": "{0,0,48},{2500,96,8}", "UNITS": "64,16", "LAYERS": "2"}
_ATTENTION |= {"ACTIVATION": "7", "OUTPUT": "0"}
_FIELDS = {"FIELDS": "39", "HEADS": "2", "SIZE": "16", "RESIDUAL": "1", "ACTIVATION": "1", "SCALE": "0.36f"}
_KEY_TILE = {"ALIGNED": "1,0", "KEY_TILES": "2", "WARPS": "8", "BLOCKS": "1", "ROWS": "16"}
_RECURRENCE = {"LSTM": "0", "GATE": "0", "INPUTS": "64", "HIDDEN": "64", "DIRECTIONS": "1", "WARPS": "8", "TILES": "1"}
_RECURRENCE |= {"KEPT": "2", "LAST_CELL": "0"}
_WIDE_LSTM = {"LSTM": "1", "INPUTS": "512", "HIDDEN": "250", "DIRECTIONS": "2", "WARPS": "16", "TILES": "2", "LAST_CELL": "1"}
_WIDE_LSTM |= {"KEPT": "0"}
_AHEAD = {"AHEAD": "1", "CONTEXT_BYTES": "8", "CONTEXT_NUMBERS": "1", "CANDIDATE_NUMBERS": "2", "ROW_WORDS": "2"}
_CARRIED = {"CARRIED": "1", "CONTEXT_BYTES": "100", "ROW_WORDS": "2"}
_ONCE = _CARRIED | {"MASKS": "1", "NARROW": "1", "FIRST_ONCE": "40", "HISTORY_PARTS": "2"}
_ONCE |= {"PARTS_OF_HISTORY": "{{0,58,2,14},{58,116,14,25}}", "MOST_PART_WORDS": "12"}
_SHARED = _CARRIED | {"SHARED": "{64,128}"}
_POOLED = {"MOST": "10", "LARGEST": "1", "MASKS": "1", "NARROW": "1"}
# MLPerf's DLRM: 12 features of one id and 14 of up to 100, 128 columns each; and bags of several dtypes, 20 columns each.
_BAGS = {"CANDIDATE_BYTES": "760", "TOTALS": "0", "TOTAL_THREADS": "0", "UNIT_THREADS": "384", "BLOCKS": "2"}
_BAGS |= {"UNITS": "0", "PARTS": "17", "SINGLES": "12", "JOINS": "1", "OUT": "bf16", "ID": "unsigned", "TOTAL_DTYPES": "1"}
_BAGS16 = _BAGS | {"VEC": "8", "TEAM": "16", "DTYPES": "2"}
_BAGS8 = _BAGS | {"VEC": "16", "TEAM": "8", "DTYPES": "8"}
_BAGS8 |= {"UNIT_THREADS": "256", "BLOCKS": "4", "FLIGHT": "4", "EVICT_FIRST": "1"}
_BAGS_MIXED = _BAGS | _POOLED | {"UNITS": "60", "VEC": "4", "TEAM": "5", "DTYPES": "15", "OUT": "float", "UNIT_THREADS": "320"}
_BAGS_MIXED |= _AHEAD | {"ID": "unsigned long long", "TOTALS": "39", "TOTAL_THREADS": "64", "AHEAD": "1"}
_PLAIN = (_FLOAT, _FLOAT | {"OUT": "bf16"}, _INT8, _INT8 | {"OUT": "float"}, _FLOAT | _FP8, _INT8 | _FP8)
_LOOKUPS = (_BAGS16, _BAGS8, _BAGS_MIXED, *_PLAIN, _FLOAT | _AHEAD, _INT8 | _AHEAD, _FLOAT | _AHEAD | _ONCE, _INT8 | _ONCE)
_LOOKUPS += (_FLOAT | _POOLED, _INT8 | _POOLED | _AHEAD, _INT8 | _AHEAD | _SHARED, _FLOAT | _AHEAD | _CARRIED)
_LOOKUPS += tuple(own | {"TIERS": "1"} for own in (_BAGS16, _BAGS_MIXED, _FLOAT, _INT8 | _POOLED | _AHEAD))

VARIANTS: dict[str, tuple[dict[str, str], ...]] = {
    "lookup/embedding": ({}, *(_LOOKUP | own for own in _LOOKUPS)),
    "dense/linear": ({"X": "float"}, {"X": "bf16"}),
    "dense/cross_epilogue": ({"X": "float"}, {"X": "bf16"}),
    "interaction/fm": ({"X": "float"}, {"X": "bf16"}),
    "interaction/cross": (
        {"X": "float", "LAYERS": "1", "DOTS": "1", "VEC": "1"},
        {"X": "bf16", "LAYERS": "6", "DOTS": "7", "VEC": "4"},
        {"X": "float", "LAYERS": "32", "DOTS": "34", "VEC": "4"},
    ),
    "waves/wave": tuple(
        _WAVE | {"X": x, "PASSES": passes, **sizes}
        for x, passes in (("float", "1"), ("float", "3"), ("bf16", "1"), ("fp8", "1"))
        for sizes in _TILES
    )
    + tuple(_WAVE | {"X": x, "PASSES": "1", "SHARES": "1", **_TILES[-1]} for x in ("float", "bf16"))
    + (_WAVE | {"X": "float", "PASSES": "1", **_CLUSTERED[0]},),
    "dense/activation": ({"X": "float", "ACTIVATION": "7"}, {"X": "bf16", "ACTIVATION": "4"}),
    "interaction/dot": (
        _DOT | {"X": "float", "DIM": "128", "ROWS": "1"},
        _DOT | {"X": "bf16", "DIM": "10", "ROWS": "1", "DIAGONAL": "1"},
    ),
    "interaction/tower": (
        {},
        *(_TOWER | _DOT | {"X": x, "DIM": "64", "KEEP": "64", "DEPTH": depth} for x, depth in (("float", "7"), ("bf16", "8"))),
        _TOWER | _DOT | {"X": "bf16", "WIDTHS": "512,256,128", "KINDS": "4,0,1", "FIELDS": "9", "DIM": "128"},
    ),
    "interaction/cin": tuple(
        _CIN | {"X": x, "FIRST": first, "PASSES": p, "WM": wm, "WK": wk}
        for x, first, p, wm, wk in (("float", "1", "3", "1", "8"), ("float", "0", "1", "8", "1"), ("bf16", "1", "1", "2", "4"))
    ),
    "interaction/cin_wgmma": tuple(
        _WIDE_CIN | {"X": x, "FIRST": first, "M": m, "COLUMNS": n, "WARPGROUPS": w, "SHARES": s, "CHUNKS": c}
        for x, first, m, n, w, s, c in (
            ("bf16", "1", "39", "128", "2", "1", "2"),
            ("bf16", "0", "39", "128", "1", "8", "2"),
            ("float", "0", "39", "112", "2", "2", "6"),
            ("float", "1", "7", "16", "1", "4", "2"),
        )
    ),
    "attention/attention": (
        _ATTENTION | {"X": "float", "FORMED": "1", "SOFTMAX": "1"},
        _ATTENTION | {"X": "bf16", "FORMED": "0", "SOFTMAX": "0", "MASK": "-1", "KEPT": "{0,0,0}"},
    ),
    "attention/field_attention": tuple(
        _FIELDS | {"X": x, "DIM": dim, "PASSES": passes}
        for x, dim, passes in (("bf16", "32", "1"), ("bf16", "10", "1"), ("float", "32", "1"), ("float", "16", "3"))
    ),
    "recurrent/recurrence": (
        {},
        *(_RECURRENCE | {"X": x, "PASSES": passes} for x, passes in (("float", "1"), ("bf16", "1"))),
        _RECURRENCE | {"X": "bf16", "PASSES": "1", "GATE": "1", "INPUTS": "10"},
        _RECURRENCE | {"X": "float", "PASSES": "3", "GATE": "2", "KEPT": "1"},
        *(_RECURRENCE | _WIDE_LSTM | {"X": x, "PASSES": passes} for x, passes in (("float", "3"), ("bf16", "1"))),
    ),
    "attention/attention_mma": (
        {},
        *(_ATTENTION | _KEY_TILE | {"X": x, "SOFTMAX": softmax} for x, softmax in (("float", "1"), ("bf16", "0"))),
        _ATTENTION
        | _KEY_TILE
        | {"X": "bf16", "SOFTMAX": "1", "MASK": "-1", "UNITS": "36,20,10", "LAYERS": "3", "KEY_TILES": "1"},
    ),
    "waves/chain": tuple(
        _CHAIN | {"X": x, "PASSES": passes, "ROWS": rows}
        for x, passes in (("float", "1"), ("float", "3"), ("bf16", "1"))
        for rows in ("1", "8")
    )
    + tuple(
        _CHAIN | {"X": x, "PASSES": "1", "ROWS": rows, "PER_ROW": "0", "FIELDS": "27", "DIM": "64", "KEEP": "64"}
        for x, rows in (("float", "8"), ("bf16", "1"))
    ),
    "waves/wave_wgmma": (
        *(_WAVE | {"X": x, **sizes} for x in ("float", "bf16", "fp8") for sizes in _WIDE_TILES),
        *(_WAVE | {"X": "float", **tile.constants} for tile in EXACT_TILES),
        *(_WAVE | {"X": "bf16", "SHARES": "1", **sizes} for sizes in _WIDE_TILES),
        _WAVE | {"X": "float", "SHARES": "1", **EXACT_TILES[0].constants},
        *(_WAVE | {"X": x, **_CLUSTERED[1]} for x in ("bf16", "fp8")),
    ),
    "waves/crossed_wgmma": tuple(
        tile.constants | {"X": x, "OUTER": outer}
        for x, size, outer in (("bf16", 2, "0"), ("bf16", 2, "1"), ("fp8", 1, "0"), ("float", 4, "0"))
        for tile in LONE_TILES
        if tile.holds(size)
    ),
    "dense/head": tuple({"X": x, "TASKS": tasks} for x, tasks in (("float", "1"), ("bf16", "1"), ("float", "3"), ("fp8", "1"))),
}
