"""A machine for pickles that only knows data.

A pickle is a program for a stack machine, and Python's own machine imports and calls whatever the
program names. The operations here build numbers, strings, tuples, lists and dicts, and the few
names that a caller allows stand for functions of the caller. Any other name is refused before
anything happens. Nothing is ever imported or called by name, so the worst that a file can be is
wrong.

Nor can it grow: a program may take a million operations, and one of n bytes may give its functions
4n bytes (a string is memoised, and can be passed again and again). So it ends within seconds, with
at most some hundred megabytes besides its own bytes.
"""

import pickletools

MAXIMUM_BYTES = 64 << 20  # of a pickle: CIFAR-10's have 31 MB, a state dict has 200 bytes a tensor
MAXIMUM_OPERATIONS = 1_000_000  # a second; a state dict has 45 a tensor
MAXIMUM_BITS = 128  # of an integer
MAXIMUM_DIMENSIONS = 32  # of an array; more than any model's tensor has, and once NumPy's own limit
# hashing a nested tuple can take for ever
MAPPING_KEYS = (str, bytes, int, float, bool, type(None))
LITERALS = {
    "INT",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG",
    "LONG1",
    "LONG4",
    "FLOAT",
    "BINFLOAT",
    "STRING",
    "BINSTRING",
    "SHORT_BINSTRING",
    "UNICODE",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
    "BYTEARRAY8",
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "EMPTY_SET": list}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
MARK = object()


class RefusedError(Exception):
    """A pickle asks for a name, or uses an operation, that the caller does not allow; nothing was
    run."""


class Name:
    """An allowed global: what the stack holds for it, and the caller's function that stands in for
    it, or None."""

    __slots__ = ("text", "function")

    def __init__(self, text, function=None):
        self.text, self.function = text, function


class Built:
    """What a caller's function may return in order to receive its state from the pickle:
    `build(state)`."""

    def build(self, state):
        raise NotImplementedError


def read_pickle(stream, names, storage_of=None, operations=MAXIMUM_OPERATIONS):
    """The object of the pickle that starts at the stream's position, which is left just behind it.

    stream: an `io.BytesIO`, so that no announced length is trusted. names: 'module name' ->
    function of the caller that is called in its place, or None if only the name matters.
    storage_of: called with each persistent id (a tuple); without it these are refused. operations:
    the most that are run. Integers of more than 128 bits, dict keys that are neither text nor
    number, and too many operations raise ValueError; damage raises whatever Python does.
    """
    stack, memo, allowance = [], {}, [4 * stream.getbuffer().nbytes + (1 << 16)]

    def pop_to_mark():
        items = []
        while (item := stack.pop()) is not MARK:
            items.append(item)
        return items[::-1]

    # a few bytes of program may pass a memoised megabyte a million times
    def call(function, *arguments):
        allowance[0] -= sum(_weight(a) for a in arguments)
        if allowance[0] < 0:
            raise ValueError("the pickle works on far more bytes than it has")
        return function(*arguments)

    for count, (opcode, argument, position) in enumerate(pickletools.genops(stream)):
        if count == operations:
            raise ValueError(f"the pickle takes more than {operations:,} operations")
        name = opcode.name
        if name in LITERALS:
            if type(argument) is int and argument.bit_length() > MAXIMUM_BITS:
                raise ValueError("an integer of more digits than any number in a file has")
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in EMPTY:
            stack.append(EMPTY[name]())
        elif name == "MARK":
            stack.append(MARK)
        elif name in TUPLES:
            items = [stack.pop() for _ in range(TUPLES[name])][::-1]
            stack.append(tuple(items))
        elif name == "TUPLE":
            stack.append(tuple(pop_to_mark()))
        elif name in ("LIST", "FROZENSET"):
            stack.append(pop_to_mark())
        elif name == "DICT":
            items = pop_to_mark()
            stack.append(dictionary(list(zip(items[::2], items[1::2], strict=True))))
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            items = [stack.pop()] if name == "APPEND" else pop_to_mark()
            expect(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else pop_to_mark()
            mapping = expect(stack[-1], dict)
            for key, value in zip(items[::2], items[1::2], strict=True):
                _put(mapping, key, value)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[argument])
        elif name == "POP":
            stack.pop()
        elif name == "POP_MARK":
            pop_to_mark()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "GLOBAL":
            stack.append(_allowed(argument, names))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_allowed(f"{expect(module, str)} {expect(attribute, str)}", names))
        elif name == "REDUCE":
            arguments, function = expect(stack.pop(), tuple), expect(stack.pop(), Name)
            if function.function is None:
                raise ValueError(
                    f"{function.text.replace(' ', '.')} is called, and it is only a type"
                )
            stack.append(call(function.function, *arguments))
        elif name == "NEWOBJ":
            arguments, function = expect(stack.pop(), tuple), expect(stack.pop(), Name)
            if function.function is not namespace:
                raise ValueError(
                    f"{function.text.replace(' ', '.')} is made in a way that torch.save does not use"
                )
            stack.append(namespace(*arguments))
        # state of a caller's object; for a dict attributes, such as a state dict's versions
        elif name == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], Built):
                call(stack[-1].build, *state if isinstance(state, tuple) else (state,))
            else:
                expect(stack[-1], dict)
        elif name == "BINPERSID" and storage_of:
            stack.append(storage_of(expect(stack.pop(), tuple)))
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            shown = (
                "a persistent object"
                if name.endswith("PERSID")
                else f"the operation {name} at byte {position}"
            )
            raise RefusedError(shown)
    raise ValueError("the pickle has no end")


def _weight(argument):
    """Bytes that a function may touch in an argument."""
    if isinstance(argument, (str, bytes, bytearray)):
        return len(argument)
    return 8 * len(argument) if isinstance(argument, (list, tuple, dict)) else 0


def _allowed(text, names):
    if text not in names:
        raise RefusedError(repr(text.replace(" ", ".", 1)[:100]))
    return Name(text, names[text])


def expect(value, kind):
    """The value, if it is of that type; else a ValueError."""
    if not isinstance(value, kind):
        raise ValueError(f"a {kind.__name__} was expected in the pickle")
    return value


def integers(values):
    """A tuple of a few non-negative ints, or a ValueError: a shape, strides."""
    if not isinstance(values, (tuple, list)) or len(values) > MAXIMUM_DIMENSIONS:
        raise ValueError("a shape or strides that do not fit any array")
    if not all(type(v) is int and v >= 0 for v in values):
        raise ValueError("a shape or strides that are not whole numbers")
    return tuple(values)


# What callers' names often stand for --------------------------------------------------------------


def dictionary(pairs=()):
    """`collections.OrderedDict`."""
    if not isinstance(pairs, (dict, list, tuple)):
        raise ValueError("a dict made from something that is not pairs")
    result = {}
    for pair in pairs.items() if isinstance(pairs, dict) else pairs:
        if not isinstance(pair, (tuple, list)):
            raise ValueError("a dict made from something that is not pairs")
        key, value = pair
        _put(result, key, value)
    return result


def namespace():
    """`argparse.Namespace`: the settings of a program, which checkpoints keep; its attributes are
    not needed."""
    return {}


def latin_bytes(text, encoding):
    """`_codecs.encode(text, 'latin1')`: how protocol 2 writes bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise ValueError("bytes in an encoding that no pickle uses")
    return text.encode("latin1")


def _put(mapping, key, value):
    # large: equal hashes
    if not isinstance(key, MAPPING_KEYS) or (isinstance(key, int) and key.bit_length() > 60):
        raise ValueError("a dict key that is neither a text nor a number")
    mapping[key] = value
