"""Results as Markdown tables, and the headline block of the benchmark page."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .results import Result, failed

BEGIN, END = "<!-- benchmark -->", "<!-- /benchmark -->"
DASH = "–"
EARLIER = " †"
"""Mark of a case that did not run with the others."""
HOLDS = {True: "yes", False: "**no**", None: ""}
_STACK = "{network}, {steps} steps, {hidden} units, batch {batch}"
_SPARSE = "sparse {network}, {neurons:,} neurons, {synapses:,} synapses, batch {batch}, per step"
HEADLINE = dict.fromkeys(
    (
        "sequence/T=64,H=256,B=32",
        "sequence/T=512,H=256,B=32",
        "sequence/T=64,H=1024,B=32",
    ),
    "one leaky layer, {steps} steps, {hidden} units, batch {batch}",
) | {
    "stacks/3xGRUCell,H=256,B=32,T=512": _STACK,
    "stacks/4xLeakyRNN,H=256,B=64,T=256": _STACK,
    "sparse_nets/LIF,N=10000,B=1,T=64": _SPARSE,
    "sparse_nets/LIF,N=10000,B=16,T=64": _SPARSE,
}
"""Cases of the headline, and the labels of their rows, by the parameters of the case."""

HEADLINE_TIMES = (
    "BPTT",
    "D_RTRL, one chunk",
    "D_RTRL, auto",
    "D_RTRL, carrying on",
    "ES_D_RTRL, auto",
)


def number(value: Any) -> str:
    """Return a number with as many digits as help."""
    if value is None:
        return DASH
    if isinstance(value, str):
        return value
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.2f}" if 0.095 <= abs(value) < 1e4 else f"{value:.2g}"


def seconds(value: float | None) -> str:
    """Return a time with its unit."""
    if value is None:
        return DASH
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _parameters(case: Result) -> str:
    return str(case["name"]).partition("/")[2] + EARLIER * ("machine" in case)


def _target_rows(cases: list[Result]) -> list[list[str]]:
    return [
        [
            _parameters(case),
            row["name"],
            number(row["value"]),
            "" if row["limit"] is None else f"≤ {number(row['limit'])}",
            HOLDS[row["holds"]],
        ]
        for case in cases
        for row in case.get("targets", [])
    ]


def _timed(cases: list[Result]) -> list[str]:
    """Return one table of times for each set of compared functions."""
    lines: list[str] = []
    groups: dict[tuple[str, ...], list[Result]] = {}
    for case in cases:
        labels = tuple(case.get("seconds", {}))
        if labels:
            groups.setdefault(labels, []).append(case)
    for labels, members in groups.items():
        rows = [
            [label, *(seconds(case["seconds"][label]["median"]) for case in members)]
            for label in sorted(labels)
        ]
        lines += table(["time per call or step", *map(_parameters, members)], rows)
    return lines


def _facts(cases: list[Result]) -> list[str]:
    rows = [
        [_parameters(case), label, number(value)]
        for case in cases
        for label, value in case.get("facts", {}).items()
    ]
    return table(["case", "what", "value"], rows) if rows else []


def _notes(cases: list[Result]) -> list[str]:
    lines = []
    for case in cases:
        if case.get("error"):
            lines.append(f"- **FAILED**: {case['name']}: {str(case['error']).splitlines()[0]}")
        for label, why in case.get("missing", {}).items():
            lines.append(f"- not available: {case['name']}, {label}: {why}")
    return [*lines, ""] if lines else []


def section(title: str, explanation: str, cases: list[Result]) -> list[str]:
    """Return everything about one question."""
    lines = [f"## {title}", "", explanation, ""]
    rows = _target_rows(cases)
    if rows:
        lines += table(["case", "what", "found", "target", "holds"], rows)
    return [*lines, *_timed(cases), *_facts(cases), *_notes(cases), ""]


def machine_lines(machine: Result) -> list[str]:
    """Return what ran the benchmarks."""
    versions = ", ".join(f"{name} {v or 'unknown'}" for name, v in machine["versions"].items())
    return [f"{machine['name']}. Python {machine['python']}, {versions}."]


def page(results: Result, sections: list[tuple[str, str, list[Result]]]) -> str:
    """Return the whole page of a machine; sections are ``(question, explanation, cases)``."""
    lines = ["# Benchmarks", "", *machine_lines(results["machine"])]
    earlier = [case["machine"] for case in results["cases"].values() if "machine" in case]
    if earlier:
        lines += ["", f"{EARLIER.strip()} marks cases of earlier runs, on:"]
        lines += dict.fromkeys(line for machine in earlier for line in machine_lines(machine))
    lines += [
        "",
        "Times are medians over rounds, which call all compared functions in turn; ratios are",
        "medians of the ratios within a round. The processes keep freed memory, so no function",
        "pays for page faults of another. Written by `python -m benchmarks`.",
        "",
    ]
    for title, explanation, cases in sections:
        lines += section(title, explanation, cases)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def headline(results: Result) -> str:
    """Return the headline: the time of a whole-sequence gradient relative to BPTT."""
    rows, machines = [], []
    for name, row in HEADLINE.items():
        case = results["cases"].get(name)
        if case is None or failed(case):
            continue
        medians = {label: case["seconds"].get(label, {}).get("median") for label in HEADLINE_TIMES}
        reference = medians["BPTT"]
        machines += machine_lines(case.get("machine", results["machine"]))
        rows.append(
            [
                row.format(**case["parameters"]),
                *(_with_ratio(medians[label], reference) for label in HEADLINE_TIMES),
            ]
        )
    intro = (
        "Time of the gradient of a whole sequence with a loss at every step, in float32. Brackets "
        "contain the ratio to backpropagation through time (BPTT). Every sequence starts after a "
        "reset, except in the column *carrying on*, where traces continue from the previous "
        "sequence. Machine: "
    )
    lines = [intro + " ".join(dict.fromkeys(machines)), ""]
    return "\n".join([*lines, *table(["", *HEADLINE_TIMES], rows)]).rstrip()


def _with_ratio(time: float | None, reference: float | None) -> str:
    if time is None or reference is None:
        return DASH
    return seconds(time) if time == reference else f"{seconds(time)} ({time / reference:.2f})"


def put_into(page: Path, block: str) -> None:
    """Replace the text between the markers of a page."""
    text = page.read_text()
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", flags=re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"{page.name} has no markers {BEGIN} and {END}.")
    page.write_text(pattern.sub(lambda _: f"{BEGIN}\n{block}\n{END}", text))
