"""Measure the library on this machine: ``python -m benchmarks --help``."""

import argparse
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from . import machine, markdown, results
from .case import Case
from .processes import run_case, run_module

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
FULL, QUICK = (31, 60.0), (4, 1.5)
"""Rounds of a case, and the seconds after which it begins no further one."""


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of a command line."""
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
    parser.add_argument(
        "--headline",
        action="store_true",
        help="write the table of docs/benchmarks.md from the last full results",
    )
    return parser.parse_args(arguments)


def chosen(platform: str, quick: bool, pattern: str | None) -> list[Case]:
    """Return the cases that an invocation runs."""
    from .catalogue import all_cases

    cases = [case for case in all_cases(platform) if (case.quick if quick else case.full)]
    if pattern is None:
        return cases
    return [case for case in cases if pattern in case.name or fnmatch(case.name, pattern)]


def run_all(cases: list[Case], platform: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Run cases and print a line for each."""
    found = {}
    for count, case in enumerate(cases, start=1):
        start = time.perf_counter()
        result = run_case(case.name, platform, rounds, seconds)
        found[case.name] = result
        print(f"[{count}/{len(cases)}] {time.perf_counter() - start:6.1f} s  {line(result)}")
        sys.stdout.flush()
    return found


def line(result: results.Result) -> str:
    """Return the result of a case in one line."""
    if results.failed(result):
        return f"FAILED {result['name']}: {str(result['error']).splitlines()[0]}"
    held = [row for row in result.get("targets", []) if row["holds"]]
    missed = results.missed(result)
    text = f"{result['name']}: {len(held)} of {len(held) + len(missed)} targets held"
    for row in missed:
        text += f"; {row['name']} {markdown.number(row['value'])}"
    missing = result.get("missing", {})
    return text + (f"; not available: {', '.join(missing)}" if missing else "")


def write(stem: Path, found: results.Result, platform: str) -> None:
    """Write JSON and Markdown."""
    from .catalogue import QUESTIONS, all_cases, explanation, heading

    names = [case.name for case in all_cases(platform)]
    found["cases"] = {name: found["cases"][name] for name in names if name in found["cases"]}
    json_file = stem.with_name(stem.name + ".json")
    results.save(json_file, found)
    sections = []
    for question in QUESTIONS:
        members = [name for name in names if name.startswith(f"{question}/")]
        cases = results.in_order(found, members)
        if cases:
            sections.append((heading(question), explanation(question), cases))
    stem.with_name(stem.name + ".md").write_text(markdown.page(found, sections))
    print(f"written: {json_file} and the .md next to it")


def update_page(stem: Path) -> int:
    """Write the first table of docs/benchmarks.md from results."""
    path = stem.with_name(stem.name + ".json")
    if not path.exists():
        print(f"There are no results of this machine ({path}): run `python -m benchmarks` first.")
        return 1
    markdown.put_into(PAGE, markdown.headline(results.load(path)))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks for; return the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["learning"]:
        from .learning import command

        return command.main(given[1:])
    options = options_of(given)
    this = run_module("machine")
    stem = options.out / machine.file_name(this["name"])
    if options.headline:
        return update_page(stem)
    cases = chosen(this["platform"], options.quick, options.only)
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return 0
    if options.quick:
        stem = stem.with_name(stem.name + "-quick")
    rounds, seconds = QUICK if options.quick else FULL
    found = results.load(stem.with_name(stem.name + ".json"))
    results.renew(found, this)
    own = run_all(cases, this["platform"], options.rounds or rounds, options.seconds or seconds)
    found["cases"] |= own
    write(stem, found, this["platform"])
    return int(any(results.failed(result) for result in own.values()))


if __name__ == "__main__":
    raise SystemExit(main())
