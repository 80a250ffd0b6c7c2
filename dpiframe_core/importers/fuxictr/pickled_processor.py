"""FuxiCTR's pickled feature processor read without running anything of it: known records become inert stand-ins.

A pickle is a program; this reader lets it make plain data, and empty records for exactly the classes below. Anything else that
it names (a class, a function, an attribute to look up) is refused by its name.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, ClassVar, cast

import numpy as np

from dpiframe_core.errors import InputError

_MAX_BYTES = 1 << 30
_LONG = 1000


class Record:
    """Stands for an object of a known class: what the pickle says of it, in `fields`. Has no behaviour."""

    kind: ClassVar[str] = "record"

    fields: dict[str, Any]

    def __new__(cls) -> Record:  # a pickle may make an object without calling __init__, and give it no state
        made = super().__new__(cls)
        made.fields = {}
        return made

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, dict):
            raise pickle.UnpicklingError(f"state of {self.kind}: got {type(state).__name__}, expected named fields")
        self.fields = dict(state)


class Processor(Record):
    kind = "FeatureProcessor"


class FeatureMapRecord(Record):
    kind = "FeatureMap"


class TokenizerRecord(Record):
    kind = "Tokenizer"


class NormalizerRecord(Record):
    kind = "Normalizer"


class StandardScalerRecord(Record):
    kind = "StandardScaler"


class MinMaxScalerRecord(Record):
    kind = "MinMaxScaler"


class Tokens(dict[Any, Any]):
    """A dict of the pickle. A long one of ids is a vocabulary: what `summed` tells, and its last entries."""

    count = total = 0

    def __setitem__(self, key: object, value: object) -> None:
        super().__setitem__(key, value)
        if len(self) >= _LONG and all(type(i) is int for i in self.values()):
            self.count, self.total = self.summed()
            self.clear()

    def summed(self) -> tuple[int, int]:
        """How many entries, and a sum of their hashes: equal for equal ones, for others by a chance of 2^-64 alone."""
        return self.count + len(self), self.total + sum(hash(f"{i} {token}") for token, i in self.items())


def tokens_of(entries: Iterable[tuple[object, object]]) -> Tokens:
    made = Tokens()
    for token, i in entries:
        made[token] = i
    return made


_CODE = re.compile(r"[fi][48]|U[1-9][0-9]{0,3}")


@dataclass
class _Array:
    """A NumPy array before its state is known: then float64 or int64 values of one or two dimensions."""

    values: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0))

    def __setstate__(self, state: object) -> None:
        if not (isinstance(state, tuple) and len(state) == 5 and isinstance(state[2], _Dtype) and isinstance(state[4], bytes)):
            raise pickle.UnpicklingError("array: got an unknown form, expected numbers")
        _, shape, dtype, fortran, data = state
        flat = np.frombuffer(data, dtype.numpy())
        self.values = flat.reshape(shape, order="F" if fortran else "C")


class _Dtype:
    """Stands for numpy.dtype: a code such as f8 (U8 of the keys of pretrained embeddings), and the byte order of its state."""

    def __init__(self, code: object, *_: object) -> None:
        if not isinstance(code, str) or not _CODE.fullmatch(code):
            raise pickle.UnpicklingError(f"array: got dtype {code!r}, expected float, integer or text")
        self._code = str(code)
        self._order = "<"

    def __setstate__(self, state: object) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">"):
            self._order = state[1]

    def numpy(self) -> np.dtype[Any]:
        return np.dtype(self._order + self._code)


def _reconstruct(_kind: object, _shape: object, _code: object) -> _Array:
    return _Array()


def _scalar(dtype: object, data: object) -> float | int | str:
    if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
        raise pickle.UnpicklingError("NumPy scalar: got an unknown form, expected a number")
    value: float | int | str = np.frombuffer(data, dtype.numpy())[0].item()
    return value


@dataclass(frozen=True)
class BoundTransform:
    """Stands for `scaler.transform`, which FuxiCTR keeps as a normaliser's function."""

    scaler: object


def _bound(owner: object, name: object) -> BoundTransform:
    """In the place of builtins.getattr: gives a stand-in for a scaler's `transform`, and nothing else."""
    if name != "transform" or not isinstance(owner, StandardScalerRecord | MinMaxScalerRecord):
        raise pickle.UnpicklingError(f"getattr: got {name!r} of {type(owner).__name__}, expected a scaler's transform")
    return BoundTransform(owner)


class _Call:
    """A function that the pickle may call. Refuses state, which a pickle could otherwise set on a plain function."""

    __slots__ = ("_do",)

    def __init__(self, do: Callable[[object, object], object] | Callable[[object, object, object], object]) -> None:
        self._do = do

    def __call__(self, *arguments: object) -> object:
        return self._do(*arguments)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("got a state for a function, expected none")


# (module, name) -> what stands for it. Types named as column dtypes are given as their names.
_ADMITTED: dict[tuple[str, str], Any] = {
    ("fuxictr.preprocess.feature_processor", "FeatureProcessor"): Processor,
    ("fuxictr.datasets.criteo", "CustomizedFeatureProcessor"): Processor,
    ("fuxictr.datasets.avazu", "CustomizedFeatureProcessor"): Processor,
    ("fuxictr.features", "FeatureMap"): FeatureMapRecord,
    ("fuxictr.preprocess.tokenizer", "Tokenizer"): TokenizerRecord,
    ("fuxictr.preprocess.normalizer", "Normalizer"): NormalizerRecord,
    ("sklearn.preprocessing._data", "StandardScaler"): StandardScalerRecord,
    ("sklearn.preprocessing._data", "MinMaxScaler"): MinMaxScalerRecord,
    ("collections", "OrderedDict"): dict,
    ("dpiframe", "dict"): _Call(lambda *_: Tokens()),
    ("builtins", "getattr"): _Call(_bound),
    ("builtins", "str"): "str",
    ("builtins", "int"): "int",
    ("builtins", "float"): "float",
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): _Dtype,
    ("numpy._core.multiarray", "_reconstruct"): _Call(_reconstruct),
    ("numpy.core.multiarray", "_reconstruct"): _Call(_reconstruct),
    ("numpy._core.multiarray", "scalar"): _Call(_scalar),
    ("numpy.core.multiarray", "scalar"): _Call(_scalar),
}


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"got {module}.{name}, expected only the records of a FuxiCTR feature processor")
        return _ADMITTED[module, name]

    def persistent_load(self, pid: object) -> Any:
        raise pickle.UnpicklingError(f"got a persistent id {pid!r}, expected none")


_PUTS, _GETS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"GET", "BINGET", "LONG_BINGET"}
_NEW_DICT = b"cdpiframe\ndict\n)R"
# Short text that goes into the memo, and an integer; and how a vocabulary's entries follow a mark, a thousand at a time.
_TEXT = b"|".join(re.escape(bytes([size])) + b".{%d}" % size for size in range(64))
_ENTRY = re.compile(b"(\x8c(?:" + _TEXT + b"))\x94(K.|M..|J....)", re.DOTALL)
_ENTRIES = re.compile(b"(?:" + _ENTRY.pattern + b")*+", re.DOTALL)


def _compact(data: mmap) -> Iterator[bytes]:
    """The pickle in parts: with `Tokens` for its dicts, and no text in the memo that nothing reads there.

    Refuses a place in the memo beyond any that so many bytes can fill.
    """
    used: set[Any] = set()
    for opcode, place, _ in pickletools.genops(cast(IO[bytes], data)):
        if opcode.name in _PUTS and isinstance(place, int) and place > len(data):
            raise pickle.UnpicklingError(f"got memo index {place}, expected at most {len(data)}, the bytes of the file")
        if opcode.name in _GETS:
            used.add(place)
        elif opcode.name == "MARK" and (run := _ENTRIES.match(data, data.tell())):
            data.seek(run.end())
    places = {place: struct.pack("<I", i) for i, place in enumerate(sorted(used))}
    puts = 0
    data.seek(0)
    for opcode, place, start in pickletools.genops(cast(IO[bytes], data)):
        if opcode.name in _PUTS:
            place, puts = puts if opcode.name == "MEMOIZE" else place, puts + 1
            yield b"r" + places[place] if place in places else b""
        elif opcode.name in _GETS:
            yield b"j" + places[place]
        elif opcode.name != "FRAME":
            yield _NEW_DICT if opcode.name == "EMPTY_DICT" else data[start : data.tell()]
        if opcode.name == "MARK" and (run := _ENTRIES.match(data, data.tell())):
            entries = _ENTRY.findall(run[0])
            if not any(place in places for place in range(puts, puts + len(entries))):
                puts += len(entries)
                data.seek(run.end())
                yield b"".join(chain.from_iterable(entries))


def read_processor(path: Path) -> Processor:
    """The feature processor's fields, tokenizers and normalisers, as stand-ins.

    Raises:
        InputError: the file is missing, damaged, or names anything but what a processor of FuxiCTR 2.3 consists of.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise InputError(str(path), f"{path.stat().st_size} bytes", f"at most {_MAX_BYTES}")
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data, TemporaryFile() as compact:
            compact.writelines(_compact(data))
            compact.seek(0)
            made = _InertUnpickler(compact).load()
    except FileNotFoundError:
        raise InputError("processor", str(path), "a file") from None
    except OSError as e:
        raise InputError(str(path), str(e), "a file that can be read, and room for a temporary one") from None
    except pickle.UnpicklingError as e:
        raise InputError(str(path), str(e), "a FuxiCTR feature processor; --normalizers FILE.yaml does without") from None
    except (EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError, UnicodeDecodeError, MemoryError,
            OverflowError, RecursionError, ImportError, NotImplementedError) as e:  # fmt: skip
        raise InputError(str(path), f"damaged data ({type(e).__name__})", "a whole FuxiCTR feature processor") from None
    if not isinstance(made, Processor):
        raise InputError(str(path), "dict" if isinstance(made, dict) else type(made).__name__, "a FuxiCTR feature processor")
    return made
