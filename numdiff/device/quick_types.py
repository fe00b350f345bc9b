"""Type inference with a memory: kernels compile in three quarters of the time, to the same PTX.

For each operation, in every round of inference of every function, Numba tries the operation's
templates, up to a dozen, until one takes the types of the arguments. What it finds depends only on
the operation, these types and the compiler's options, so the signature and its implementation are
kept.
"""

import contextlib

try:
    from numba.core.types.functions import BaseFunction
    from numba.cuda.core.targetconfig import ConfigStack

    plain_call_type, top_options = BaseFunction.get_call_type, ConfigStack.top_or_none
    available = "_impl_keys" in plain_call_type.__code__.co_names
except (ImportError, AttributeError):  # not in this version of Numba
    available = False

# ids of function and context, types, options -> signature, its implementation, and whose the ids
# are
answers = {}
texts = {}  # id of options -> the options, and their text


def options_text():
    options = top_options()
    if id(options) not in texts:
        texts[id(options)] = options, repr(options)  # kept, so that no other can have this id
    return texts[id(options)][1]


def get_call_type(self, context, args, kws):
    key = id(self), id(context), tuple(args), tuple(kws.items()), options_text()
    if key not in answers:
        signature = plain_call_type(self, context, args, kws)
        answers[key] = signature, self._impl_keys[signature.args], (self, context)
    signature, self._impl_keys[signature.args], _ = answers[key]
    return signature


@contextlib.contextmanager
def quick_types():
    """Context: Numba compiles with a memory; without one where this version of Numba lacks what it
    takes."""
    if available:
        BaseFunction.get_call_type = get_call_type
    try:
        yield
    finally:
        if available:
            BaseFunction.get_call_type = plain_call_type
