"""Sentences for a learner: what a fault, a wrong value or a cost means, and what to change."""

import re

import numpy as np

from ..emulator.advice import advice_of

# Which fault to explain first: one that causes others comes before them
FIRST = ("error", "division", "bounds", "deadlock", "divergence", "race", "uninitialised")


def sentence(text):
    text = text.strip()
    return text[0].upper() + text[1:] + ("" if text[-1] in ".!?" else ".")


def most_telling(faults):
    """The fault to explain first."""
    return min(faults, key=lambda f: FIRST.index(f.kind) if f.kind in FIRST else len(FIRST) - 2.5)


def line_of(fault, path):
    """The line of the learner's file that a fault names, or None."""
    places = [fault.place, *(place for _, place in fault.others)]
    return next((place.line for place in places if place.file == str(path)), None)


def explain(fault, path):
    """A fault in a few sentences: the line, what happened there, what to change."""
    line = line_of(fault, path)
    where = f"Line {line}" if line else "The kernel"
    who = (
        f" (thread {fault.thread[0] if not any(fault.thread[1:]) else fault.thread}"
        if fault.thread
        else ""
    )
    who += (
        f", block {fault.block[0] if not any(fault.block[1:]) else fault.block})"
        if who and any(fault.block or ())
        else ")"
        if who
        else ""
    )
    # a beginner's threads have one number
    message = re.sub(r"\((\d+), 0, 0\)", r"\1", fault.message)
    message = message.replace(
        "the emulator does not know arithmetic on whole arrays: index their elements",
        "arithmetic on whole arrays",
    )
    text = f"{where}{who}: {message}"
    for what, place in fault.others[:1]:
        if place.file == str(path) and fault.kind in ("race", "divergence", "asynchronous"):
            text += (
                f"; {what} line {place.line}" if place.line != line else f"; {what} the same line"
            )
    return f"{sentence(text)} {advice_for(fault)}".strip()


def advice_for(fault):
    if "arithmetic on whole arrays" in fault.message:
        return "A thread computes single elements: index each array, as in out[i] = a[i]."
    return advice_of(fault)


# Values -------------------------------------------------------------------------------------------


def index_text(index):
    return f"out[{', '.join(str(int(n)) for n in index)}]"


def explain_unwritten(written, text, blocks):
    """Some elements of the output were never written.

    written: a mask of its elements; text: the learner's file; blocks: how many blocks the grid has
    """
    if not written.any():
        todo = "each thread must store its result in out"
        for line, each in enumerate(text.splitlines(), 1):
            if "# fill in" in each:
                todo = f"line {line} still says `# fill in`: replace it"
                break
            if re.match(r"\s+out\s*=[^=]", each):
                todo = f"line {line} gives a variable a new value: an element is out[index]"
        return f"The kernel writes nothing to out; {todo}."
    missing = np.argwhere(~written)
    return (
        f"No thread writes {index_text(missing[0])} ({len(missing)} of {written.size} elements are never written). "
        "Check the index and the guard: do the threads cover all elements?"
        + (
            " Is x the column, and y the row?"
            if written.ndim == 2
            else " Does the index depend on the block, cuda.blockIdx.x?"
            if blocks > 1
            else ""
        )
    )


def explain_values(out, expected, tolerance, half):
    """The output is wrong in some elements. half: whether an input is float16."""
    wrong = ~close(out, expected, tolerance)
    first = tuple(np.argwhere(wrong)[0])
    text = (
        f"{sentence(index_text(first))[:-1]} is {out[first]:.6g}, and NumPy gives {expected[first]:.6g} "
        f"({int(wrong.sum())} of {wrong.size} elements differ)."
    ).replace("Out[", "out[")
    if out.ndim == 2 and out.shape[0] == out.shape[1] and close(out, expected.T, tolerance).all():
        return f"{text} The result is the transpose: the two indices are in the wrong order."
    if close(out, expected, 1e-2).all():
        return f"{text} That is nearly right: " + (
            "something is computed in float16 that should be float32."
            if half
            else "is each element used once, and is nothing rounded or cast on the way?"
        )
    flat, want = out.reshape(-1), expected.reshape(-1)
    for shift in (1, -1):
        if (
            flat.size > 2
            and close(np.roll(flat, shift)[2:-2], want[2:-2], tolerance).all()
            and flat.size > 8
        ):
            return f"{text} The values are those of a neighbour: an index is off by one."
    if not np.isfinite(flat[wrong.reshape(-1)].astype(np.float64)).any():
        return f"{text} Not a finite number: check divisions, exponentials, and what an accumulator starts with."
    if wrong.sum() <= wrong.size // 4:
        edges = np.argwhere(wrong)
        at_end = {int(edges[:, -1].min()), int(edges[:, -1].max())} & {0, out.shape[-1] - 1}
        if at_end:
            return f"{text} The wrong elements include an edge of the array: check the first and the last thread."
    return text


def close(out, expected, tolerance):
    scale = max(1e-30, float(np.abs(expected.astype(np.float64)).max(initial=0)))
    return np.abs(out.astype(np.float64) - expected.astype(np.float64)) <= tolerance * scale


# Costs --------------------------------------------------------------------------------------------

COSTS = {
    "sectors": "it moves {n:,} transactions (32 bytes each) of global memory",
    "requests": "its warps execute {n:,} loads and stores of global memory",
    "shared_requests": "its warps execute {n:,} loads and stores of shared memory",
    "tensor_flops": "its tensor cores compute {n:,} FLOPs",
}


NEIGHBOURS = (
    "Neighbouring threads (threadIdx.x and threadIdx.x + 1) should access neighbouring elements: "
    "threadIdx.x belongs to the last index."
)
ORDER = (
    "Right, but the last bits of the result depend on the order of the threads. Floating-point sums need a fixed "
    "order: a tree or shuffles instead of atomic additions."
)


def explain_uncoalesced(line, figures, why):
    takes, would = figures.sectors / figures.requests, figures.ideal_sectors / figures.requests
    both = figures.reads["global"] and figures.writes["global"]  # one of them may be coalesced
    return (
        f"Right, but not coalesced: in line {line} a warp's access takes {takes:.3g} transactions"
        f"{' on average' if both else ''}, and {would:.3g} would do. {why or NEIGHBOURS}"
    )


def explain_conflicts(line, figures):
    ways = max(2, round(figures.wavefronts / figures.ideal_wavefronts))
    return (
        f"Right and coalesced, but {ways}-way bank conflicts in line {line}; three stars need none. Elements of "
        "shared memory that are 32 words apart share a bank, which serves one of them at a time."
    )


def explain_cost(key, n, limit, why):
    return (
        f"Right and coalesced, but {COSTS[key].format(n=n)}; three stars need "
        f"{f'at most {limit:,}' if limit else 'none'}. {why}"
    ).strip()
