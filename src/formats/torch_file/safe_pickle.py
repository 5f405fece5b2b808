"""Reads pickles of plain values and of named records, without running anything that they name.

Pickles call whatever they name. Here each allowed name stands for a class of this module, which takes plain
values only; nothing else can be named, called or looked up. Those instructions of the pickle machine that
reserve memory by a number in the file, or copy values in bulk, are refused, too.
"""

# The machine in Python is typed in part.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

import io
import pickle
import pickletools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from cairn.checkpoint.manifest import Damaged

MAX_FIELDS = 64
"""Fields of a record, or arguments of a value: more than any has, and few enough to copy without thought."""
_INSTRUCTIONS = frozenset(
    word
    for words in (
        "PROTO STOP FRAME MARK POP POP_MARK GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD BINPERSID",
        "NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG1 LONG4 FLOAT BINFLOAT",
        "UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES",
        "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS",
        "EMPTY_DICT DICT SETITEM SETITEMS GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE",
    )
    for word in words.split()
)


class ForbiddenPickle(Damaged):
    """A pickle names or does what is not allowed."""


class PickledObject:
    """An object of a class that the pickle named: its fields, by name or, for some classes, in a tuple."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.values: tuple[Any, ...] = ()

    def set(self, state: object) -> None:
        """Take the state that the pickle holds.

        Raises:
            Refused: it is neither a small dictionary with names nor a small tuple.
        """
        if isinstance(state, dict) and len(state) <= MAX_FIELDS and all(type(key) is str for key in state):
            self.fields = dict(state)
        elif isinstance(state, tuple) and len(state) <= MAX_FIELDS:
            self.values = state
        else:
            raise ForbiddenPickle(f"the state of a {type(self).__name__} is a {type(state).__name__}")


def record(name: str) -> type[PickledObject]:
    """A new kind of record."""
    return type(name, (PickledObject,), {})


def ordered_dict(*arguments: object) -> dict[Any, Any]:
    """A stand-in for OrderedDict, which is pickled empty and then filled."""
    if arguments:
        raise ForbiddenPickle("an OrderedDict is made from arguments")
    return {}


def ignored(*_: object) -> None:
    """Stands for what Cairn does not need."""


class _Machine(pickle._Unpickler):
    """The pickle machine in Python: the one in C reserves memory for any number that a file names as a slot
    of its memo."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {  # pyright: ignore[reportIncompatibleVariableOverride]
        ord(known.code): pickle._Unpickler.dispatch[ord(known.code)]
        for known in pickletools.opcodes
        if known.name in _INSTRUCTIONS
    }

    def __init__(
        self,
        data: bytes,
        allowed: Mapping[tuple[str, str], Any],
        persistent: Callable[[object], object] | None,
    ):
        super().__init__(io.BytesIO(data))
        self._allowed = allowed
        self._callable: dict[int, Callable[..., object]] = {}
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise ForbiddenPickle(f"names {module}.{name}, which is not allowed")
        found = self._allowed[module, name]
        if callable(found):
            self._callable[id(found)] = found
        return found

    def persistent_load(self, pid: object) -> object:
        if self._persistent is None:
            raise ForbiddenPickle("refers to something outside the pickle")
        return self._persistent(pid)

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self.stack.append(self._made(function, arguments))

    def load_build(self) -> None:
        """Give a record its fields; attributes of a dictionary, such as `_metadata`, are dropped."""
        state, owner = self.stack.pop(), self.stack[-1]
        if isinstance(owner, dict):
            return
        if not isinstance(owner, PickledObject):
            raise ForbiddenPickle(f"a {type(owner).__name__} is given fields")
        owner.set(state)

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._fill(items)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._fill([key, value])

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self._fill(items)

    def _fill(self, items: list[Any]) -> None:
        filled = self.stack[-1]
        if not isinstance(filled, dict) or len(items) % 2:
            raise ForbiddenPickle("items are put into what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int) and not isinstance(key, PickledObject):
                raise ForbiddenPickle(f"a {type(key).__name__} is the key of a dictionary")
            filled[key] = value

    def _made(self, function: object, arguments: object) -> object:
        if id(function) not in self._callable or not callable(function):
            raise ForbiddenPickle(f"calls a {type(function).__name__}")
        if not isinstance(arguments, tuple) or len(arguments) > MAX_FIELDS:
            raise ForbiddenPickle("calls a function with too many arguments")
        return function(*arguments)

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_reduce
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.DICT[0]] = load_dict


def load(
    data: bytes, allowed: Mapping[tuple[str, str], Any], persistent: Callable[[object], object] | None = None
) -> Any:
    """The value that a pickle holds.

    Args:
        allowed: what stands for each (module, name) that the pickle may name.
        persistent: what stands for a reference to something outside; None if there may be none.

    Raises:
        Refused: the pickle names or does anything else.
        Damaged: it is no whole pickle.
    """
    try:
        return _Machine(data, allowed, persistent).load()
    except Damaged:
        raise
    except KeyError as error:
        raise ForbiddenPickle(f"holds an instruction that is not allowed: {error}") from None
    except Exception as error:  # the machine raises whatever a wrong instruction runs into
        raise Damaged(f"not a whole pickle: {type(error).__name__}: {error}") from None
