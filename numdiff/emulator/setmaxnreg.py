"""`setmaxnreg`: how many registers each thread of a warpgroup has (PTX ISA, section 9.7.19.5).

A block starts with as many for each thread. A producer's warpgroup gives some back, and its
consumers take them; where all of them together want more than the block was started with, one waits
for ever, which is a fault.
"""

from .faults import Unsupported
from .wgmma_layouts import WARPGROUP

REGISTERS = 65536  # of a multiprocessor
MAX_REGISTERS = 255  # of a thread


def set_registers(machine, count, more):
    """`setmaxnreg.inc` (more) or `.dec`: the registers of each thread of the warpgroup (PTX ISA,
    section 9.7.19.5)."""
    if machine.cc != (9, 0):
        raise Unsupported(
            f"setmaxnreg needs compute capability 9.0, not {machine.cc[0]}.{machine.cc[1]}"
        )
    thread, site = machine.thread, machine.site_here()
    block = thread.block
    state = block.state.get("registers")
    if state is None:
        start = min(REGISTERS // len(block.threads) // 8 * 8, MAX_REGISTERS // 8 * 8)
        state = block.state["registers"] = {"start": start, "now": {}, "sites": {}}
        block.state.setdefault("at_end", []).append(lambda: _check_registers(machine, block, state))
    group = thread.tid // WARPGROUP
    calls = state["sites"].setdefault((group, site), [0, thread, count])
    calls[0] += 1
    if calls[0] % min(WARPGROUP, len(block.threads) - group * WARPGROUP) != 1:
        return
    now = state["now"].get(group, state["start"])
    if count < now if more else count > now:
        machine.report(
            "error",
            f"setmaxnreg.{'inc' if more else 'dec'} to {count} registers in a warpgroup that has "
            f"{now} a thread",
            site,
        )
    state["now"][group] = count


def _check_registers(machine, block, state):
    """At the end of a block: check that whole warpgroups took part, and that all of them had enough
    registers."""
    for (group, site), (calls, thread, _) in state["sites"].items():
        size = min(WARPGROUP, len(block.threads) - group * WARPGROUP)
        if calls % size:
            machine.report(
                "divergence",
                f"setmaxnreg is executed by {calls % size} of the {size} threads of a warpgroup",
                site,
                thread,
            )
        elif size < WARPGROUP:
            machine.report(
                "divergence",
                f"setmaxnreg in a warpgroup of {size} threads: it needs {WARPGROUP}",
                site,
                thread,
            )
    groups = -(-len(block.threads) // WARPGROUP)
    pool = state["start"] * groups
    total = sum(state["now"].get(g, state["start"]) for g in range(groups))
    if total > pool:
        (_, site), (_, thread, count) = max(state["sites"].items(), key=lambda item: item[1][2])
        machine.report(
            "error",
            f"setmaxnreg: the warpgroups of the block want {total * WARPGROUP} registers together, "
            f"it was started with {pool * WARPGROUP}: this one waits for ever",
            site,
            thread,
        )
