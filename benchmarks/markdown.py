"""Results as Markdown tables."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .results import Result

DASH = "–"
EARLIER = " †"
"""Mark of a case that did not run with the others."""
HOLDS = {True: "yes", False: "**no**", None: ""}


def number(value: Any) -> str:
    """Return a number with as many digits as help."""
    if value is None:
        return DASH
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.2f}" if 0.095 <= abs(value) < 1e4 else f"{value:.2g}"


def in_units(value: float | None, units: Mapping[str, float]) -> str:
    """Return a number with three digits, in the first unit that is not larger, else the last."""
    if value is None:
        return DASH
    counts = {unit: value * per for unit, per in units.items()}
    unit = next((name for name, count in counts.items() if count >= 1), [*units][-1])
    return f"{counts[unit]:.3g} {unit}"


def seconds(value: float | None) -> str:
    return in_units(value, {"s": 1.0, "ms": 1e3, "µs": 1e6})


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
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


def _failures(cases: list[Result]) -> list[str]:
    failed = [case for case in cases if case["error"]]
    return [f"- **FAILED**: {case['name']}: {case['error'].splitlines()[0]}" for case in failed]


def section(title: str, explanation: str, cases: list[Result]) -> list[str]:
    lines = [f"## {title}", "", explanation, ""]
    rows = _target_rows(cases)
    if rows:
        lines += table(["case", "what", "found", "target", "holds"], rows)
    return [*lines, *_timed(cases), *_facts(cases), *_failures(cases), ""]


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
