"""Measure the library on this machine: ``python -m benchmarks --help``."""

import argparse
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from . import machine, markdown, results, timing
from .case import Case
from .processes import run_apart

FULL, QUICK = (31, 60.0), (4, 1.5)
"""Rounds of a case, and the seconds after which it begins no further one."""


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Run all cases, each in a process of its own, and write results/<machine>.json "
        "and .md. Exits with 1 if a case fails; a missed target is only reported. `python -m "
        "benchmarks learning --help` trains networks instead.",
    )
    parser.add_argument("--quick", action="store_true", help="few cases and repeats: three minutes")
    parser.add_argument("--only", metavar="PATTERN", help="cases whose name contains or matches it")
    parser.add_argument("--rounds", type=int, help="rounds of a case")
    parser.add_argument("--seconds", type=float, help="time after which a case begins no round")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of the results")
    return parser.parse_args(arguments)


def chosen(platform: str, quick: bool, pattern: str = "") -> list[Case]:
    from .catalogue import all_cases

    cases = [case for case in all_cases(platform) if (case.quick if quick else case.full)]
    return [case for case in cases if pattern in case.name or fnmatch(case.name, pattern)]


def run_case(name: str, platform: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Run a case in a process of its own; if it dies, the case has an error."""
    try:
        return run_apart(timing.run_named, name, platform, rounds, seconds)
    except RuntimeError as error:
        return {"name": name, "error": str(error)}


def line(result: results.Result) -> str:
    if result["error"]:
        return f"FAILED {result['name']}: {result['error'].splitlines()[0]}"
    judged = [row for row in result["targets"] if row["holds"] is not None]
    missed = [row for row in judged if not row["holds"]]
    text = f"{result['name']}: {len(judged) - len(missed)} of {len(judged)} targets held"
    return text + "".join(f"; {row['name']} {markdown.number(row['value'])}" for row in missed)


def write(stem: Path, found: results.Result, platform: str) -> None:
    """Write JSON and Markdown, with the cases in the order of the catalogue."""
    from .catalogue import QUESTIONS, all_cases, heading

    names = [case.name for case in all_cases(platform)]
    cases = {name: found["cases"][name] for name in names if name in found["cases"]}
    found["cases"] = cases
    json_file = stem.with_name(stem.name + ".json")
    results.save(json_file, found)
    sections = []
    for question in QUESTIONS:
        own = [case for name, case in cases.items() if name.startswith(f"{question}/")]
        if own:
            sections.append((*heading(question), own))
    stem.with_name(stem.name + ".md").write_text(markdown.page(found, sections))
    print(f"written: {json_file} and the .md next to it")


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["learning"]:
        from .learning import command

        return command.main(given[1:])
    options = options_of(given)
    this = run_apart(machine.describe)
    cases = chosen(this["platform"], options.quick, options.only or "")
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return 0
    stem = options.out / (machine.file_name(this["name"]) + "-quick" * options.quick)
    rounds, seconds = QUICK if options.quick else FULL
    sizes = options.rounds or rounds, options.seconds or seconds
    found = results.load(stem.with_name(stem.name + ".json"))
    results.renew(found, this)
    has_failed = False
    for count, case in enumerate(cases, start=1):
        found["cases"][case.name] = result = run_case(case.name, this["platform"], *sizes)
        print(f"[{count}/{len(cases)}] {line(result)}", flush=True)
        has_failed |= bool(result["error"])
    write(stem, found, this["platform"])
    return int(has_failed)


if __name__ == "__main__":
    raise SystemExit(main())
