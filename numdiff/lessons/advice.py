"""Sentences for a learner: what a fault, a wrong value or a cost means, and what to change."""
import re

import numpy as np

# Which fault to explain first: one that causes others comes before them
FIRST = ("error", "division", "bounds", "deadlock", "divergence", "race", "uninitialised")
BARRIER = "Put cuda.syncthreads() between the two, where every thread of the block reaches it."
ADVICE = {
    "division": "Check what the divisor can be in each thread.",
    "deadlock": "Check the loop's condition and what changes it, and that each wait has something that ends it.",
    "divergence": "All threads must reach the same call: move it out of the `if`, and guard only the loads and stores.",
    "cp.async": "A copy is asynchronous: commit it, wait for its group, and then let all threads meet at a barrier.",
    "asynchronous": "Wait for the phase of the mbarrier that this copy completes, before you use its bytes.",
    "mbarrier": "In each phase the barrier must expect exactly the bytes that are copied, and get its arrivals.",
    "wgmma": "The product is asynchronous: wgmma_fence before it, wgmma_commit after it, a wait before its results.",
    "proxy": "TMA and the tensor cores read shared memory by another path: call fence_proxy_async() after the stores "
             "and before the barrier.",
    "descriptor": "The descriptor must describe the tile in the layout in which it was written.",
    "alignment": "A load or store of 16 bytes needs an index that is a multiple of 16 bytes.",
}
KERNEL_CODE = "A kernel may use numbers, elements of arrays, loops and branches, and no other objects of Python."
OUTSIDE = "There are more threads than elements, or the index is computed wrongly: a thread without an element must " \
          "do nothing. Guard the access by a comparison with {bound}."
OUTSIDE_SHARED = "{name} is shorter than that: is the index off by one, or does the array lack elements for the halo?"
NEGATIVE = "This thread would use another element than you mean: guard the access, so that it does nothing."
UNWRITTEN_SHARED = "Check which elements the threads fill, the last ones and the halo too, and " \
                   "that cuda.syncthreads() comes between writes and reads."
UNWRITTEN = "Only the inputs, and what the kernel itself has written, hold a value."
BLOCKS = "Blocks run in any order and do not wait for each other: let each block write elements of its own."
PHASE = "Each phase needs its arrivals and its bytes: compare the count given to mbarrier_init with the arrivals, " \
        "and the parity with the phase that the thread waits for."
INITIALISED = "Let one thread initialise it, once, before a cuda.syncthreads()."
TWO_WRITE = "Two threads write the same element: only one of them may, or a barrier must come between."
FLOAT64 = "A bare number such as 2 or 0.5 makes the arithmetic float64, which most GPUs do 32 to 64 times slower. " \
          "Write np.float32(2)."


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
    who = f" (thread {fault.thread[0] if not any(fault.thread[1:]) else fault.thread}" if fault.thread else ""
    who += (f", block {fault.block[0] if not any(fault.block[1:]) else fault.block})" if who and any(fault.block or ())
            else ")" if who else "")
    message = re.sub(r"\((\d+), 0, 0\)", r"\1", fault.message)  # a beginner's threads have one number
    message = message.replace("the emulator does not know arithmetic on whole arrays: index their elements",
                              "arithmetic on whole arrays")
    text = f"{where}{who}: {message}"
    for what, place in fault.others[:1]:
        if place.file == str(path) and fault.kind in ("race", "divergence", "asynchronous"):
            text += f"; {what} line {place.line}" if place.line != line else f"; {what} the same line"
    return f"{sentence(text)} {advice_for(fault)}".strip()


def advice_for(fault):
    if "arithmetic on whole arrays" in fault.message:
        return "A thread computes single elements: index each array, as in out[i] = a[i]."
    if fault.kind == "error" and "is a float" in fault.message:
        return "An index must be an integer: divide with //."
    if "NameError" in fault.message:
        return "Is the name misspelt, not imported, or used before it has a value?"
    if fault.kind == "error" and "arguments" not in fault.message:
        return KERNEL_CODE
    if fault.kind == "bounds":
        return NEGATIVE if "is negative" in fault.message else outside(fault.message)
    if fault.kind in ("deadlock", "mbarrier") and "mbarrier" in fault.message:
        return INITIALISED if "initialises" in fault.message else PHASE
    if fault.kind == "uninitialised":
        return UNWRITTEN_SHARED if "shared" in fault.message else UNWRITTEN
    if fault.kind == "race":
        if "of block" in fault.message or "orders the blocks" in fault.message:
            return BLOCKS
        return TWO_WRITE if fault.message.startswith("writes") and "has written" in fault.message else BARRIER
    return ADVICE.get(fault.kind, "")


def outside(message):
    found = re.search(r"(shared )?(\w+)\[", message)
    if not found:
        return ""
    shared, name = found.groups()
    if shared or name.startswith(("tile", "sum", "value")):
        return OUTSIDE_SHARED.format(name=name)
    axis = re.search(r"axis (\d)", message)
    return OUTSIDE.format(bound=f"{name}.shape[{axis[1]}]" if axis else f"{name}.size")


# Values ---------------------------------------------------------------------------------------------------------------

def index_text(index):
    return f"out[{', '.join(str(int(n)) for n in index)}]"


def explain_unwritten(written, text, blocks):
    """Some elements of the output were never written.

    written: a mask of its elements; text: the learner's file; blocks: how many blocks the grid has
    """
    if not written.any():
        line = next((n for n, each in enumerate(text.splitlines(), 1) if "# fill in" in each), None)
        todo = f"line {line} still says `# fill in`: replace it" if line else "each thread must store its result in out"
        return f"The kernel writes nothing to out; {todo}."
    missing = np.argwhere(~written)
    return (f"No thread writes {index_text(missing[0])} ({len(missing)} of {written.size} elements are never written). "
            "Check the index and the guard: do the threads cover all elements?"
            + (" Is x the column, and y the row?" if written.ndim == 2 else
               " Does the index depend on the block, cuda.blockIdx.x?" if blocks > 1 else ""))


def explain_values(out, expected, tolerance, half):
    """The output is wrong in some elements. half: whether an input is float16."""
    wrong = ~close(out, expected, tolerance)
    first = tuple(np.argwhere(wrong)[0])
    text = (f"{sentence(index_text(first))[:-1]} is {out[first]:.6g}, and NumPy gives {expected[first]:.6g} "
            f"({int(wrong.sum())} of {wrong.size} elements differ).").replace("Out[", "out[")
    if out.ndim == 2 and out.shape[0] == out.shape[1] and close(out, expected.T, tolerance).all():
        return f"{text} The result is the transpose: the two indices are in the wrong order."
    if close(out, expected, 1e-2).all():
        return f"{text} That is nearly right: " + (
            "something is computed in float16 that should be float32." if half else
            "is each element used once, and is nothing rounded or cast on the way?")
    flat, want = out.reshape(-1), expected.reshape(-1)
    for shift in (1, -1):
        if flat.size > 2 and close(np.roll(flat, shift)[2:-2], want[2:-2], tolerance).all() and flat.size > 8:
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


# Costs ----------------------------------------------------------------------------------------------------------------

COSTS = {"sectors": "it moves {n:,} transactions (32 bytes each) of global memory",
         "requests": "its warps execute {n:,} loads and stores of global memory",
         "shared_requests": "its warps execute {n:,} loads and stores of shared memory",
         "tensor_flops": "its tensor cores compute {n:,} FLOPs"}


NEIGHBOURS = "Neighbouring threads (threadIdx.x and threadIdx.x + 1) should access neighbouring elements: " \
             "threadIdx.x belongs to the last index."
ORDER = "Right, but the last bits of the result depend on the order of the threads. Floating-point sums need a fixed " \
        "order: a tree or shuffles instead of atomic additions."


def explain_uncoalesced(line, figures, why):
    takes, would = figures.sectors / figures.requests, figures.ideal_sectors / figures.requests
    return (f"Right, but not coalesced: in line {line} a warp's access takes {takes:.3g} transactions, and {would:.3g} "
            f"would do. {why or NEIGHBOURS}")


def explain_conflicts(line, figures):
    ways = max(2, round(figures.wavefronts / figures.ideal_wavefronts))
    return (f"Right and coalesced, but {ways}-way bank conflicts in line {line}; three stars need none. Elements of "
            "shared memory that are 32 words apart share a bank, which serves one of them at a time.")


def explain_cost(key, n, limit, why):
    return (f"Right and coalesced, but {COSTS[key].format(n=n)}; three stars need "
            f"{f'at most {limit:,}' if limit else 'none'}. {why}").strip()
