"""Faults of many launches as one list: a finding for each pair of lines, with its source and a
sentence of advice."""

import linecache
import os
from dataclasses import dataclass, field

from .advice import CONFLICTS, UNCOALESCED, advice_of
from .faults import Fault, Place

WASTE = 2.0  # times the sectors that would do: a row that is not aligned takes less


def source_of(place):
    linecache.checkcache(place.file)
    return linecache.getline(place.file, place.line).strip()


def path_of(file):
    """A path as short as it can be written: relative to the current folder if it is in it."""
    try:
        short = os.path.relpath(file)
    except ValueError:  # on another drive
        return file
    return file if short.startswith("..") else short


def said(place):
    """A place with its source: `smooth.py:11 in smooth, block (0, 0, 0), thread (1, 0, 0): tile[t]
    = x[i]`."""
    text = f"{path_of(place.file)}:{place.line} in {place.function}"
    if place.thread is not None:
        text += f", block {place.block}, thread {place.thread}"
    source = source_of(place)
    return f"{text}: {source}" if source else text


@dataclass
class Finding:
    """A fault, however often it was seen, in whichever launches and thread orders."""

    fault: Fault
    count: int = 0
    launched: list[Place] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)

    def __str__(self):
        fault = self.fault
        lines = [f"{fault.kind}: {fault.message}", f"at {said(fault.place)}"]
        lines += [f"{what} {said(place)}" for what, place in fault.others]
        lines += [f"launched at {said(place)}" for place in self.launched[:3]]
        if self.count > 1:
            lines.append(f"{self.count:,} times")
        if self.orders:
            lines.append(f"with the threads {' and '.join(self.orders)}")
        advice = advice_of(fault)
        return "\n    ".join([*lines, advice] if advice else lines)


def merge(faults_by_order):
    """[`Finding`] of {thread order: faults}: one for each kind and pair of lines, float64 last."""
    found = {}
    for order, faults in faults_by_order.items():
        for fault in faults:
            lines = [
                (place.file, place.line)
                for place in (fault.place, *(place for _, place in fault.others[:1]))
            ]
            key = (fault.kind, *lines) if fault.kind != "race" else (fault.kind, *sorted(lines))
            finding = found.setdefault(key, Finding(fault))
            finding.count += fault.count
            if fault.launched is not None and fault.launched not in finding.launched:
                finding.launched.append(fault.launched)
            if order not in finding.orders:
                finding.orders.append(order)
    for finding in found.values():
        if len(faults_by_order) == 1 or len(finding.orders) == len(faults_by_order):
            finding.orders = []  # it is in all
    return sorted(found.values(), key=lambda finding: finding.fault.kind == "float64")


@dataclass
class Cost:
    """What a line wastes. kind: "bank conflicts" or "not coalesced"; its requests, and wavefronts
    or sectors."""

    kind: str
    file: str
    line: int
    requests: int = 0
    taken: int = 0
    needed: int = 0

    def add(self, other):
        self.requests += other.requests
        self.taken += other.taken
        self.needed += other.needed

    def __str__(self):
        unit, advice = (
            ("wavefronts", CONFLICTS) if self.kind == "bank conflicts" else ("sectors", UNCOALESCED)
        )
        place = Place("", self.file, self.line)
        return (
            f"{self.kind}: {self.taken / self.requests:.3g} {unit} per request, where "
            f"{self.needed / self.requests:.3g} would do (requests: {self.requests:,})\n"
            f"    at {path_of(self.file)}:{self.line}: {source_of(place)}\n    {advice}"
        )


def costs_of(recorder):
    """[`Cost`] of the lines that a `Recorder` has counted, those that waste something."""
    found = []
    for (file, line), figures in (recorder.lines() if recorder.launches else {}).items():
        if figures.conflicts:
            found.append(
                Cost(
                    "bank conflicts",
                    file,
                    line,
                    figures.shared_requests,
                    figures.wavefronts,
                    figures.ideal_wavefronts,
                )
            )
        if figures.sectors > WASTE * figures.ideal_sectors:
            found.append(
                Cost(
                    "not coalesced",
                    file,
                    line,
                    figures.requests,
                    figures.sectors,
                    figures.ideal_sectors,
                )
            )
    return found


def merge_costs(costs):
    """[`Cost`], one for each kind and line, what wastes most first."""
    found = {}
    for cost in costs:
        found.setdefault(
            (cost.kind, cost.file, cost.line), Cost(cost.kind, cost.file, cost.line)
        ).add(cost)
    return sorted(found.values(), key=lambda cost: cost.needed - cost.taken)
