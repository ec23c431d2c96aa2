"""The page on scaling, from counted operations, bytes and messages."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .. import scaling
from ..markdown import table
from .times import H100, PARTS, Rates, Terms, terms_of

Counted = Mapping[str, Any]
Row = tuple[Mapping[str, Any], Terms]

WAYS = ("weak", "strong")
TEXT = """\
# Scaling to 1,024 devices (model)

These times are computed, not measured. They follow from the operations and bytes of
`braintrace.plan`, the messages of compiled programs and published rates of the hardware.
`python -m benchmarks.scaling` counts them and writes this page. See [Run on several
devices](../sharding.md) for the sharding itself.

## Results

*Weak* scaling adds samples with each device. *Strong* scaling divides the same samples over more
devices. Samples are sharded over `data`, units over `model`, or both. The table has the throughput
on {most:,} devices, relative to the fewest devices with enough memory, as the range over
{networks} networks and rules. A value below 1 is slower.

{results}
## Bottlenecks

The table names the largest part of a step, on the fewest devices with enough memory and in the
fastest mesh of the most devices. A mesh is `data` x `model`. If units are sharded as well, the
throughput can grow faster than the number of devices, because each device reads fewer parameters.

{summary}
## Model

{arithmetic}

## Hardware

| {name} | |
|---|---|
| float32 | {operations:.0f} TFLOP/s |
| memory | {capacity:.0f} GB, {memory:.2f} TB/s |
| link within a host, between hosts | {within:.0f} GB/s, {between:.0f} GB/s |
| assumed latency in a host, between hosts | {latency_within:.0f} µs, {latency_between:.0f} µs |

{sources}

## Communication

Messages are counted as *per step + per update*. Bytes are multiples of *activity + parameters with
traces + readout*, per device; a fraction is an array that XLA shards in another way. Each row is
for eight simulated devices along one axis, with Adam.

{messages}
"""


def page(counted: Counted, rates: Rates = H100) -> str:
    """Return the page as Markdown."""
    arithmetic = str(scaling.__doc__).split("\n\n", 1)[1]
    gains = list(_gains(counted, rates))
    return TEXT.format(
        most=max(devices_of(gain.last[0]) for gain in gains),
        networks=len(counted["cases"]),
        results="\n".join(_results(gains)),
        summary="\n".join(_summary(gains)),
        arithmetic=as_markdown(arithmetic),
        name=rates.name,
        operations=rates.operations / 1e12,
        memory=rates.memory / 1e12,
        capacity=rates.capacity / 1e9,
        within=rates.within / 1e9,
        between=rates.between / 1e9,
        latency_within=rates.latency_within * 1e6,
        latency_between=rates.latency_between * 1e6,
        sources="\n".join(f"- {source}" for source in rates.sources),
        messages="\n".join(_messages(counted)),
    )


def rows_of(counted: Counted, case: Mapping[str, Any], way: str, rates: Rates) -> list[Row]:
    """Return all plans of a case that are scaled in some way, with their times."""
    (messages,) = ({entry["every"]: entry for entry in counted["messages"] if _is_of(entry, case)},)
    return [
        (plan, terms_of(plan, messages[min(plan["every"], max(messages))], case, rates))
        for plan in case["plans"]
        if plan["way"] == way
    ]


def _is_of(entry: Mapping[str, Any], case: Mapping[str, Any]) -> bool:
    return bool(entry["kind"] == case["kind"] and entry["rule"] == case["rule"])


def devices_of(plan: Mapping[str, Any]) -> int:
    """Return how many devices a plan is for."""
    return int(plan["data"] * plan["model"])


def _messages(counted: Counted) -> list[str]:
    rows = []
    for entry in counted["messages"]:
        cells = [entry["kind"], entry["rule"].upper(), str(entry["every"])]
        for axis in ("data", "model"):
            found = entry[axis]
            cells.append(f"{found['by step']} + {found['by update']}")
            cells.append(" + ".join(f"{found[f'of {part}']:.3g}" for part in PARTS))
        rows.append(cells)
    head = ("network", "rule", "steps per update", "messages over `data`", "bytes")
    return table((*head, "messages over `model`", "bytes"), rows)


class Gain(NamedTuple):
    """Gain of many devices over few."""

    name: str
    way: str
    every: int
    first: Row
    last: Row

    @property
    def devices(self) -> int:
        return devices_of(self.last[0]) // devices_of(self.first[0])

    @property
    def throughput(self) -> float:
        before, after = (
            plan["samples"] * plan["data"] / terms.total for plan, terms in (self.first, self.last)
        )
        return float(after / before)


def _gains(counted: Counted, rates: Rates) -> Iterator[Gain]:
    """Yield, of every case, the fewest devices that have the memory and the best of the most."""
    for case in counted["cases"]:
        for way in WAYS:
            for every in sorted({plan["every"] for plan in case["plans"]}):
                own = [r for r in rows_of(counted, case, way, rates) if r[0]["every"] == every]
                fitting = [row for row in own if row[1].fits]
                first = min(fitting, key=lambda row: devices_of(row[0]))
                most = max(devices_of(plan) for plan, _ in fitting)
                best = [row for row in fitting if devices_of(row[0]) == most]
                last = min(best, key=lambda row: row[1].total)
                yield Gain(case["name"], way, every, first, last)


def _results(gains: list[Gain]) -> list[str]:
    """Return the table of throughputs: their range over all networks, and the bottlenecks."""
    rows = []
    for way in WAYS:
        for every in sorted({gain.every for gain in gains}):
            own = [gain for gain in gains if (gain.way, gain.every) == (way, every)]
            found = sorted(gain.throughput for gain in own)
            binds = Counter(gain.last[1].binds for gain in own).most_common()
            bottlenecks = ", ".join(f"{what} ({number} of {len(own)})" for what, number in binds)
            throughput = f"{_times(found[0])} to {_times(found[-1])}"
            rows.append([way, str(every), throughput, bottlenecks])
    return table(("scaling", "steps per update", "throughput", "bottlenecks"), rows)


def _times(gain: float) -> str:
    return f"{gain:,.0f}" if gain >= 100 else f"{gain:.3g}"


def _summary(gains: list[Gain]) -> list[str]:
    """Return the table of bottlenecks by network, on the fewest devices and on the most."""
    rows = []
    for gain in gains:
        cells = [gain.name, gain.way, str(gain.every)]
        for plan, terms in (gain.first, gain.last):
            cells.append(f"{plan['data']}x{plan['model']}: {terms.binds}")
        rows.append([*cells, _times(gain.throughput), f"{gain.devices:,}"])
    head = ("network and rule", "scaling", "steps per update", "fewest devices", "most devices")
    return table((*head, "throughput ratio", "device ratio"), rows)


def as_markdown(docstring: str) -> str:
    """Return the text of a docstring, its formulas as Markdown has them."""
    blocks = docstring.strip().split("\n\n")
    return "\n\n".join(
        f"$$ {block.removeprefix('.. math:: ')} $$"
        if block.startswith(".. math:: ")
        else re.sub(r":math:`(.*?)`", r"$\1$", block, flags=re.DOTALL).replace("``", "`")
        for block in blocks
    )
