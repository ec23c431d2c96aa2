"""The page on scaling, and its plots, from what has been counted."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from braintrace._optional import optional_import

from .. import scaling
from ..markdown import DASH, seconds, table
from .times import H100, PARTS, Rates, Terms, terms_of

Counted = Mapping[str, Any]
Row = tuple[Mapping[str, Any], Terms]

SHOWN = (1, 8, 64, 256, 1024)
"""Devices in the tables."""

WAYS = {
    "weak": "Weak: {each} samples on each device",
    "strong": "Strong: {together} samples on all devices together",
}
HEAD = (
    "devices",
    "mesh",
    "update",
    "compute",
    "memory",
    "data",
    "model",
    "step",
    "binds",
    "efficiency",
)
TEXT = """\
# On many devices, on paper

What follows is computed, not measured: from operations and bytes that `braintrace.plan` counts,
from messages counted in programs that XLA has compiled, and from the rates that a vendor
publishes. `python -m benchmarks.scaling` counts anew and writes this page; how a learner is
divided is on the page on [many devices](sharding.md).

## In short

Devices are added in two ways. *Weak*: each new device brings samples of its own, and more are
learned from at a time. *Strong*: the samples stay as many, and each device has fewer. In both, the
samples can be divided over the devices (`data`), the units (`model`), or both.

{in_short}

## The arithmetic

{arithmetic}

## Rates

{name}: {operations:.0f} TFLOP/s of single precision, {memory:.2f} TB/s of memory, of which there
are {capacity:.0f} GB. A device sends {within:.0f} GB/s to others of its host and {between:.0f} GB/s
to other hosts. A round of messages takes {latency_within:.0f} µs within a host and
{latency_between:.0f} µs between hosts: nobody publishes these two, they are assumed.

{sources}

## Messages

Counted for eight simulated devices along one axis, with Adam, for an update after every step and
for one after a block. Messages: at every step + once a block. Bytes: those of the activity of all
units, for the samples of a device and the steps of the block, times the first number + those of the
parameters with traces times the second + those of a readout without times the third (a number that
is none of a few multiples stands for a size that XLA divided in another way).

{messages}
## What binds

What takes the largest part of a step on the fewest devices that have the memory, and in the fastest
mesh of the most devices. A mesh is `data` x `model`; *update* is the number of steps from one
update to the next. *Throughput* says how many times as many samples are learned from in a second,
and *devices* with how many times as many devices. The first can exceed the second where units are
divided as well: each device then reads fewer parameters for more samples.

{summary}
"""

TABLES = """\
## How to read the tables

All times are those of a step: the four terms, their sum (of compute and memory, the longer one
counts), and which is the largest. A row in brackets does not fit into the memory of a device. The
efficiency is the throughput of a device over that on the fewest devices of the same kind of mesh
that have the memory.
"""
DIVIDED = {
    "weak": "Each device with its own samples (weak)",
    "strong": "The same samples on more devices (strong)",
}


def page(counted: Counted, rates: Rates = H100) -> str:
    """Return the page as Markdown."""
    arithmetic = str(scaling.__doc__).split("\n\n", 1)[1]
    lines = [
        TEXT.format(
            arithmetic=as_markdown(arithmetic),
            sources="\n".join(f"- {source}" for source in rates.sources),
            name=rates.name,
            operations=rates.operations / 1e12,
            memory=rates.memory / 1e12,
            capacity=rates.capacity / 1e9,
            within=rates.within / 1e9,
            between=rates.between / 1e9,
            latency_within=rates.latency_within * 1e6,
            latency_between=rates.latency_between * 1e6,
            messages="\n".join(_messages(counted)),
            in_short="\n".join(_in_short(counted, rates)),
            summary="\n".join(_summary(counted, rates)),
        )
    ]
    lines += ["## One row by hand", "", *_by_hand(counted, rates), "", TABLES]
    for case in counted["cases"]:
        lines += [f"## {case['name']}", "", f"![{case['name']}](_static/{picture(case)})", ""]
        for way, title in WAYS.items():
            rows = rows_of(counted, case, way, rates)
            shown = [row for row in rows if devices_of(row[0]) in SHOWN]
            lines += [f"### {title.format(**case)}", ""]
            lines += table(HEAD, [_cells(row, rows) for row in shown])
    return "\n".join(lines)


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


def efficiency(row: Row, rows: list[Row]) -> float | None:
    """Return the throughput of a device, over that on the fewest that have the memory."""
    plan, terms = row

    alike = ("every", "divided")
    same = [r for r in rows if r[1].fits and all(r[0][key] == plan[key] for key in alike)]
    if not terms.fits or not same:
        return None

    def throughput(row: Row) -> float:
        samples = row[0]["samples"] * row[0]["data"]
        return float(samples / row[1].total / devices_of(row[0]))

    return throughput(row) / throughput(min(same, key=lambda r: devices_of(r[0])))


def _cells(row: Row, rows: list[Row]) -> list[str]:
    plan, terms = row
    parts = (terms.compute, terms.memory, terms.data, terms.model, terms.total)
    share = efficiency(row, rows)
    cells = [
        f"{devices_of(plan):,}",
        f"{plan['data']}x{plan['model']}",
        str(plan["every"]),
        *(seconds(part) if part else DASH for part in parts),
        terms.binds,
        DASH if share is None else f"{share:.2f}",
    ]
    return cells if terms.fits else [f"({cell})" for cell in cells]


def _messages(counted: Counted) -> list[str]:
    rows = []
    for entry in counted["messages"]:
        cells = [entry["kind"], entry["rule"].upper(), str(entry["every"])]
        for axis in ("data", "model"):
            found = entry[axis]
            cells.append(f"{found['by step']} + {found['by update']}")
            cells.append(" + ".join(f"{found[f'of {part}']:.3g}" for part in PARTS))
        rows.append(cells)
    return table(("network", "rule", "update", "data", "bytes", "model", "bytes"), rows)


class Gain(NamedTuple):
    """What many devices gain over few."""

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


def _in_short(counted: Counted, rates: Rates) -> Iterator[str]:
    """Yield what more devices gain, over all networks, and what then takes longest."""
    gains = list(_gains(counted, rates))
    most = max(devices_of(gain.last[0]) for gain in gains)
    yield (
        f"Samples learned from in a second on {most:,} devices, as a multiple of those on the "
        "fewest devices that have the memory, from the worst to the best of "
        f"{len(counted['cases'])} networks and rules (less than 1 is slower):"
    )
    yield ""
    for way, words in DIVIDED.items():
        for every in sorted({gain.every for gain in gains}):
            own = [gain for gain in gains if (gain.way, gain.every) == (way, every)]
            found = sorted(gain.throughput for gain in own)
            binds = Counter(gain.last[1].binds for gain in own).most_common()
            longest = ", ".join(f"{what} ({number} of {len(own)})" for what, number in binds)
            update = "every step" if every == 1 else f"every {every} steps"
            yield (
                f"- {words}, an update after {update}: {_times(found[0])} to {_times(found[-1])} "
                f"times. What takes longest there: {longest}."
            )


def _times(gain: float) -> str:
    return f"{gain:,.0f}" if gain >= 100 else f"{gain:.3g}"


def _summary(counted: Counted, rates: Rates) -> list[str]:
    """Return the table of what binds: on how few devices, and on how many."""
    rows = []
    for gain in _gains(counted, rates):
        cells = [gain.name, gain.way, str(gain.every)]
        for plan, terms in (gain.first, gain.last):
            cells.append(f"{plan['data']}x{plan['model']}: {terms.binds}")
        rows.append([*cells, _times(gain.throughput), f"{gain.devices:,}"])
    head = (
        "network and rule",
        "scaling",
        "update",
        "fewest devices",
        "most devices",
        "throughput",
        "devices",
    )
    return table(head, rows)


def _by_hand(counted: Counted, rates: Rates) -> Iterator[str]:
    """Yield one row with its numbers put in."""
    case = next(case for case in counted["cases"] if case["rule"] == "d_rtrl")
    rows = rows_of(counted, case, "weak", rates)
    plan, terms = next(
        row for row in rows if devices_of(row[0]) == 64 and row[0]["model"] == row[0]["every"] == 1
    )
    size, near, hosts = plan["parameters"], rates.of_a_host, plan["data"] // rates.of_a_host
    rounds = f"3 · {rates.latency_within:.1g} + {(hosts - 1).bit_length()} · "
    yield (
        f"{case['name']}, {plan['samples']} samples on each of {plan['data']} devices, an update "
        "after every step:"
    )
    yield ""
    yield (
        f"- compute: {plan['flops']:,} / {rates.operations:.3g} per second = "
        f"{seconds(terms.compute)}"
    )
    yield (
        f"- memory: ({plan['arguments']:,} + {plan['results']:,}) bytes / {rates.memory:.3g} per "
        f"second = {seconds(terms.memory)}; 2 · {plan['traces']:,} of these bytes are traces"
    )
    yield (
        f"- all-reduce over data of {size:,} bytes: 2 · {near - 1}/{near} · {size:,} / "
        f"{rates.within:.3g} + 2 · {hosts - 1}/{hosts} · {size // near:,} / {rates.between:.3g} "
        f"+ 2 · ({rounds}{rates.latency_between:.1g}) = {seconds(terms.data)}"
    )
    yield f"- in all {seconds(terms.total)}"


def as_markdown(docstring: str) -> str:
    """Return the text of a docstring, its formulas as Markdown has them."""
    blocks = docstring.strip().split("\n\n")
    return "\n\n".join(
        f"$$ {block.removeprefix('.. math:: ')} $$"
        if block.startswith(".. math:: ")
        else re.sub(r":math:`(.*?)`", r"$\1$", block, flags=re.DOTALL).replace("``", "`")
        for block in blocks
    )


def picture(case: Mapping[str, Any]) -> str:
    """Return the file name of the plot of a case."""
    plain = re.sub(r"[^a-z0-9]+", "-", case["name"].lower()).strip("-")
    return f"scaling-{plain}.png"


COLOURS = {1: "tab:blue", 100: "tab:orange"}
STYLES = {"samples": "-", "both": "--", "units": ":"}


def draw(counted: Counted, folder: Path, rates: Rates = H100) -> None:
    """Draw the throughput of every case against the number of devices."""
    figures = optional_import("matplotlib.figure", "benchmarks")
    for case in counted["cases"]:
        figure = figures.Figure(figsize=(8, 3.6), layout="constrained")
        for panel, (way, title) in zip(figure.subplots(1, 2), WAYS.items(), strict=True):
            rows = [row for row in rows_of(counted, case, way, rates) if row[1].fits]
            for every in sorted({plan["every"] for plan, _ in rows}):
                for divided, style in STYLES.items():
                    _line(panel, rows, every, divided, style)
            panel.set_title(title.format(**case), fontsize="small")
            panel.set(xlabel="devices", ylabel="samples and steps / s", xscale="log", yscale="log")
            panel.grid(alpha=0.3)
        figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        figure.savefig(folder / picture(case), dpi=80, metadata={"Software": None})


def _line(panel: Any, rows: list[Row], every: int, divided: str, style: str) -> None:
    own = [
        (devices_of(plan), plan["samples"] * plan["data"] / terms.total)
        for plan, terms in rows
        if plan["every"] == every and plan["divided"] == divided
    ]
    if own:
        updates = "step" if every == 1 else f"{every} steps"
        label = f"update every {updates}, {divided} divided"
        panel.plot(*zip(*own, strict=True), style, marker=".", color=COLOURS[every], label=label)
