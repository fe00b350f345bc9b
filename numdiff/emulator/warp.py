"""Warp operations: shuffles, votes, matches.

PTX ISA, sections 9.7.9.6 (`shfl.sync`) and 9.7.13 (`vote.sync`, `match.sync`).

All lanes in the mask must reach the same operation. No lane waits for one that has ended, but a
value taken from a missing lane is undefined, and reported.
"""

import sys

from .faults import Missing
from .threads import FULL_MASK
from .values import Int32, UInt32


def warp_functions(machine):
    frame = sys._getframe

    def gather(name, mask, payload, combine, at):
        mask = int(mask) & FULL_MASK
        lane = machine.thread.lane
        if not mask >> lane & 1:
            machine.report(
                "divergence",
                f"{name} with the mask {mask:#x} is called by lane {lane}, which the mask "
                "does not name",
                machine.site_here(),
            )
            mask |= 1 << lane
        return machine.scheduler.gather(name, mask, payload, combine, at)

    def shuffle(name, source):
        """source(lane, argument, width) -> the lane to read, or None to keep one's own value."""

        def combine(payloads, threads):
            results = {}
            for lane, (own, argument, width) in payloads.items():
                other = source(lane, int(argument), int(width))
                if other is None or other == lane:
                    results[lane] = own
                elif other in payloads:
                    results[lane] = payloads[other][0]
                else:
                    machine.absent_lane(name, threads[lane], other)
                    results[lane] = _undefined(own)
            return results

        def call(mask, value, argument, width=32):
            return gather(name, mask, (value, argument, width), combine, frame(1))

        return call

    def segment(lane, width):
        return lane // width * width

    def up(lane, delta, width):
        return lane - delta if lane - delta >= segment(lane, width) else None

    def down(lane, delta, width):
        return lane + delta if lane + delta < segment(lane, width) + width else None

    def xor(lane, mask, width):
        return lane ^ mask if (lane ^ mask) < segment(lane, width) + width else None

    def index(lane, source, width):
        return segment(lane, width) + source % width

    def vote(name, function):
        def combine(payloads, threads):
            return dict.fromkeys(payloads, function(payloads))

        def call(mask, predicate):
            return gather(name, mask, bool(predicate), combine, frame(1))

        return call

    def ballot(payloads):
        return UInt32(sum(1 << lane for lane, value in payloads.items() if value))

    def match_any_sync(mask, value):
        def combine(payloads, threads):
            return {
                lane: UInt32(sum(1 << other for other, theirs in payloads.items() if theirs == own))
                for lane, own in payloads.items()
            }

        return gather("match_any_sync", mask, value, combine, frame(1))

    def match_all_sync(mask, value):
        def combine(payloads, threads):
            same = len(set(payloads.values())) == 1
            result = (UInt32(sum(1 << lane for lane in payloads)) if same else UInt32(0), same)
            return dict.fromkeys(payloads, result)

        return gather("match_all_sync", mask, value, combine, frame(1))

    def activemask():
        """The lanes that come to this call before any of them continues: all of a warp in
        straight-line code.

        Where lanes wait at several calls of a function, those at the first one continue and may
        come to the others.
        """
        thread, at = machine.thread, machine._frame_here()
        here = thread.state["active"] = at.f_code, at.f_lasti

        def arrived():
            lanes = [
                t
                for t in thread.block.warp_threads(thread.warp)
                if not t.done and (t.state.get("active", (None, 0))[0] is here[0])
            ]
            if min(t.state["active"][1] for t in lanes) < here[1]:
                return False
            lanes = [t for t in lanes if t.state["active"] == here]
            for t in lanes:
                t.state["mask"] = sum(1 << other.lane for other in lanes)
            return True

        def continues(result):
            del thread.state["active"]
            return UInt32(thread.state["mask"])

        return machine.scheduler.wait_for_others(
            arrived, "active lanes", "activemask()", at, continues
        )

    def lanemask_lt():
        return UInt32((1 << machine.thread.lane) - 1)

    def syncwarp(mask=FULL_MASK):
        def combine(payloads, threads):
            if machine.checked:
                machine.scheduler.join(list(threads.values()))

        return gather("syncwarp", mask, None, combine, frame(1))

    return {
        "shfl_sync": shuffle("shfl_sync", index),
        "shfl_up_sync": shuffle("shfl_up_sync", up),
        "shfl_down_sync": shuffle("shfl_down_sync", down),
        "shfl_xor_sync": shuffle("shfl_xor_sync", xor),
        "all_sync": vote("all_sync", lambda p: all(p.values())),
        "any_sync": vote("any_sync", lambda p: any(p.values())),
        "eq_sync": vote("eq_sync", lambda p: len(set(p.values())) == 1),
        "ballot_sync": vote("ballot_sync", ballot),
        "match_any_sync": match_any_sync,
        "match_all_sync": match_all_sync,
        "activemask": activemask,
        "lanemask_lt": lanemask_lt,
        "syncwarp": syncwarp,
    }


def _undefined(value):
    """A value that cannot be mistaken for a result: NaN, or all bits set."""
    if isinstance(value, Missing):
        return value
    if isinstance(value, int):
        return (
            value.__class__(-1) if value.__class__ in (int, Int32) else value.__class__(FULL_MASK)
        )
    return value.__class__("nan")
