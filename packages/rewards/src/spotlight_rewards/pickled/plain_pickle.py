"""Reads pickles of numbers, text, lists, dictionaries and numpy's arrays of numbers. Calls nothing of theirs.

``pickle.Unpickler`` is not used: even with few names allowed, numpy's own callables take pointers and object
arrays. Here ``pickletools`` splits the pickle, and a small machine knows the few operations of plain values.
"""

from __future__ import annotations

import math
import pickletools
import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

_OPERATIONS_MAX = 1 << 16
_UNITS_MAX = 1 << 24
"""Of a value written out, where what is shared counts each time: a character is one unit."""
_UNITS_EACH = 16
"""Of a number, list or dictionary: at most a million of them."""
_DEPTH_MAX = 100
_AXES_MAX = 64
"""numpy's own limit."""
_INTEGER_MAX_BITS, _KEY_MAX_BITS = 1024, 63
_NUMBERS = re.compile(r"b1|[iu][1248]|f[248]")
_NAMES = {
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    *(
        (f"numpy.{package}.{module}", name)
        for package in ("core", "_core")
        for module, name in (
            ("multiarray", "_reconstruct"),
            ("multiarray", "scalar"),
            ("numeric", "_frombuffer"),
        )
    ),
}
"""What pickles of arrays, of numpy 1 and 2, look up by name."""


class UnsafePickleError(ValueError):
    """A pickle names something else to be called."""


@dataclass(frozen=True, slots=True)
class _Name:
    """In the place of numpy's callable of this name."""

    name: str


@dataclass(slots=True)
class _Dtype:
    code: str
    order: Literal["<", ">", "="] = "="


@dataclass(slots=True)
class _Array:
    """An array, or a scalar (shape ``()``); without a dtype until its state is read."""

    dtype: _Dtype | None = None
    content: bytes | bytearray = b""
    shape: tuple[int, ...] = ()
    order: str = "C"


def load_plain(content: bytes) -> Any:
    """The value of a pickle, of protocol 3 or later (Python 3's own), with lists in the place of arrays.

    Raises:
        UnsafePickleError: it holds other objects; nothing of them was called.
        ValueError: it is no pickle, broken, or its value is too large.
    """
    try:
        return _Written().out(_Machine().run(content))
    except UnsafePickleError:
        raise
    except Exception as error:  # noqa: BLE001 - broken pickles raise anything
        raise ValueError(f"no readable pickle ({type(error).__name__}: {error})") from None


class _Machine:
    """Pickle's stack, marks and memo, for plain values."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        for number, (operation, argument, _) in enumerate(pickletools.genops(content)):
            if number >= _OPERATIONS_MAX:
                raise ValueError(f"more than {_OPERATIONS_MAX:,} operations")
            self._do(operation.name, argument)
        return self._stack.pop()

    def _do(self, operation: str, argument: Any) -> None:
        stack = self._stack
        match operation:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[operation])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "LONG4" | "BINFLOAT":
                stack.append(argument)
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8":
                stack.append(argument)
            case "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8" | "BYTEARRAY8":
                stack.append(argument)
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                self._memo[len(self._memo) if operation == "MEMOIZE" else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL" | "STACK_GLOBAL":
                self._name(argument)
            case "REDUCE":
                arguments, called = stack.pop(), stack.pop()
                stack.append(_made(called, arguments))
            case "BUILD":
                state = stack.pop()
                _set_state(stack[-1], state)
            case _:
                self._collect(operation)

    def _collect(self, operation: str) -> None:
        stack = self._stack
        match operation:
            case "MARK":
                self._marks.append(stack)
                self._stack = []
            case "EMPTY_LIST" | "EMPTY_DICT" | "EMPTY_TUPLE":
                stack.append({"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}[operation]())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                length = int(operation[-1])
                if len(stack) < length:
                    raise ValueError("an empty stack")
                stack[-length:] = [tuple(stack[-length:])]
            case "TUPLE":
                self._since_mark()
                self._stack.append(tuple(stack))
            case "APPENDS" | "SETITEMS":
                self._since_mark()
                _add(self._stack[-1], stack, operation == "SETITEMS")
            case "APPEND":
                value = stack.pop()
                _add(stack[-1], [value], pairs=False)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _add(stack[-1], [key, value], pairs=True)
            case _:
                raise UnsafePickleError(
                    f"the pickle has the operation {operation}; expected numbers, text, lists, dictionaries "
                    "and arrays of numpy, in protocol 3 or later"
                )

    def _since_mark(self) -> None:
        self._stack = self._marks.pop()

    def _name(self, argument: str | None) -> None:
        if argument is None:
            name, module = self._stack.pop(), self._stack.pop()
        else:
            module, _, name = argument.partition(" ")
        if not isinstance(module, str) or not isinstance(name, str) or (module, name) not in _NAMES:
            raise UnsafePickleError(
                f"the pickle holds a {module}.{name}; expected numbers, text, lists, dictionaries and "
                "arrays of numpy. It was not made."
            )
        self._stack.append(_Name(name))


def _add(target: Any, items: list[Any], pairs: bool) -> None:
    if not pairs and type(target) is list:
        target.extend(items)
    elif pairs and type(target) is dict and len(items) % 2 == 0:
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing a tuple of shared tuples takes time exponential in the length of the pickle.
            if not isinstance(key, str | bytes | int | float | None):
                raise ValueError(f"a dictionary's key is a {type(key).__name__}; expected text or a number")
            # Long integers of equal hashes make a dictionary's time quadratic.
            if isinstance(key, int) and key.bit_length() > _KEY_MAX_BITS:
                raise ValueError(f"a dictionary's key of {key.bit_length():,} bits; expected {_KEY_MAX_BITS}")
            target[key] = value
    else:
        raise ValueError(f"items for a {type(target).__name__}")


def _made(called: Any, arguments: Any) -> _Array | _Dtype:
    match called, arguments:
        case _Name("dtype"), (str(code), *_):
            if not _NUMBERS.fullmatch(code):
                raise UnsafePickleError(f"the pickle holds an array of {code!r}; expected numbers")
            return _Dtype(code)
        case _Name("_reconstruct"), (_Name("ndarray"), *_):
            return _Array()
        case _Name("scalar"), (_Dtype() as dtype, bytes(content)):
            return _Array(dtype, content)
        case _Name("_frombuffer"), (bytes() | bytearray() as content, dtype, shape, order, *rest):
            if any(each is not None for each in rest):
                raise ValueError("an array with its axes permuted")
            return _array(content, dtype, shape, order)
    raise UnsafePickleError(f"the pickle calls {called!r} in another way than numpy's own pickles do")


def _set_state(target: Any, state: Any) -> None:
    match target, state:
        case _Dtype(), (int(), "<" | ">" | "=" | "|" as order, None, None, None, *_):
            target.order = order if order in ("<", ">") else "="
        case _Array(dtype=None), (int(), shape, dtype, bool() | int() as by_columns, bytes(content)):
            made = _array(content, dtype, shape, "F" if by_columns else "C")
            target.dtype, target.content, target.shape = made.dtype, made.content, made.shape
            target.order = made.order
        case _:
            raise UnsafePickleError(f"the pickle sets the state of a {type(target).__name__}")


def _array(content: bytes | bytearray, dtype: Any, shape: Any, order: Any) -> _Array:
    # Bounded before lengths are multiplied: a huge integer, shared by all axes, would take hours.
    sound = (
        isinstance(shape, tuple)
        and len(shape) <= _AXES_MAX
        and all(type(each) is int and 0 <= each <= _UNITS_MAX for each in shape)
    )
    if not isinstance(dtype, _Dtype) or not sound or order not in ("C", "F"):
        raise ValueError("an array's dtype, shape or order is invalid")
    return _Array(dtype, content, shape, order)


class _Written:
    """Writes a value out: shared parts are copied, within limits, and arrays become lists."""

    def __init__(self) -> None:
        self._units = 0

    def out(self, value: Any, depth: int = 0) -> Any:
        if depth > _DEPTH_MAX:
            raise ValueError(f"lists in lists, more than {_DEPTH_MAX}")
        self._count(_UNITS_EACH + (len(value) if isinstance(value, str | bytes | bytearray) else 0))
        if isinstance(value, _Array):
            return self._list(value)
        if isinstance(value, dict):
            return {self.out(key): self.out(each, depth + 1) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.out(each, depth + 1) for each in value]
        if isinstance(value, _Name | _Dtype):
            raise UnsafePickleError(f"the pickle holds numpy's {value}; expected values")
        if isinstance(value, int) and value.bit_length() > _INTEGER_MAX_BITS:
            raise ValueError(f"an integer of {value.bit_length():,} bits; expected {_INTEGER_MAX_BITS}")
        return value

    def _list(self, array: _Array) -> Any:
        if array.dtype is None:
            raise ValueError("an array without content")
        dtype = np.dtype(array.dtype.code).newbyteorder(array.dtype.order)
        # An axis of length 0 makes no list of the others short.
        self._count(_UNITS_EACH * math.prod(max(1, length) for length in array.shape))
        if math.prod(array.shape) * dtype.itemsize != len(array.content):
            raise ValueError(f"an array {array.shape} of {array.dtype.code} in {len(array.content)} bytes")
        if not array.content:
            return np.empty(array.shape, dtype).tolist()
        return np.frombuffer(array.content, dtype).reshape(array.shape, order=array.order).tolist()  # type: ignore[call-overload]

    def _count(self, units: int) -> None:
        self._units += units
        if self._units > _UNITS_MAX:
            raise ValueError(
                f"its value is too large; expected at most {_UNITS_MAX // _UNITS_EACH:,} numbers"
            )
