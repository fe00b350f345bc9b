"""One sentence of advice for each fault, and for what costs time: what to change in the kernel."""

import re

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
OUTSIDE = (
    "There are more threads than elements, or the index is computed wrongly: a thread without an element must "
    "not access the array. Guard the access by a comparison with {bound}."
)
OUTSIDE_SHARED = "{name} is shorter than that: is the index off by one, or does the array lack elements for the halo?"
NEGATIVE = "This thread would use another element than you mean: guard the access, so that it does nothing."
UNWRITTEN_SHARED = (
    "Check which elements the threads fill, the last ones and the halo too, and "
    "that cuda.syncthreads() comes between writes and reads."
)
UNWRITTEN = "Only the inputs, and what the kernel itself has written, hold a value."
BLOCKS = "Blocks run in any order and do not wait for each other: let each block write elements of its own."
PHASE = (
    "Each phase needs its arrivals and its bytes: compare the count given to mbarrier_init with the arrivals, "
    "and the parity with the phase that the thread waits for."
)
INITIALISED = "Let one thread initialise it, once, before a cuda.syncthreads()."
TWO_WRITE = (
    "Two threads write the same element: only one of them may, or a barrier must come between."
)
FLOAT64 = (
    "A bare number such as 2 or 0.5 makes the arithmetic float64, which most GPUs do 32 to 64 times slower. "
    "Write np.float32(2)."
)
WHOLE_ARRAYS = "A thread computes single elements: index each array."
CAST = "An index must be an integer: divide with //."
NAME = "Is the name misspelt, not imported, or used before it has a value?"
CONFLICTS = "Elements that are 32 words apart share a bank, which serves one of them at a time: pad each row by one."
UNCOALESCED = "Neighbouring threads should access neighbouring elements: threadIdx.x belongs to the last index."


def advice_of(fault):
    """What to change, for a `Fault`; "" where its message says it."""
    message = fault.message
    if "arithmetic on whole arrays" in message:
        return WHOLE_ARRAYS
    if fault.kind == "error" and "is a float" in message:
        return CAST
    if "NameError" in message:
        return NAME
    if fault.kind == "error" and "arguments" not in message:
        return KERNEL_CODE
    if fault.kind == "float64":
        return FLOAT64
    if fault.kind == "bounds":
        return NEGATIVE if "is negative" in message else outside(message)
    if fault.kind in ("deadlock", "mbarrier") and "mbarrier" in message:
        return INITIALISED if "initialises" in message else PHASE
    if fault.kind == "uninitialised":
        return UNWRITTEN_SHARED if "shared" in message else UNWRITTEN
    if fault.kind == "race":
        if "of block" in message or "orders the blocks" in message:
            return BLOCKS
        return TWO_WRITE if message.startswith("writes") and "has written" in message else BARRIER
    return ADVICE.get(fault.kind, "")


def outside(message):
    """Advice for an index out of bounds: which size to compare with."""
    found = re.search(r"(shared )?(\w+)\[", message)
    if not found:
        return ""
    shared, name = found.groups()
    if shared or name.startswith(("tile", "sum", "value")):
        return OUTSIDE_SHARED.format(name=name)
    axis = re.search(r"axis (\d)", message)
    return OUTSIDE.format(bound=f"{name}.shape[{axis[1]}]" if axis else f"{name}.size")
