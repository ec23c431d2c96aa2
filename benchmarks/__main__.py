"""Measure the library on this machine: ``python -m benchmarks --help``."""

import argparse
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from . import machine, markdown, plots, results
from .case import Case
from .processes import OWN, Interpreter, other, run_case, run_module

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
LEARNING = "learning"
"""What is trained, and not timed: see `python -m benchmarks learning --help`."""

FULL, QUICK = (31, 60.0), (4, 1.5)
"""Rounds of a case, and the seconds after which it begins no further one."""


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Run all cases, each in a process of its own, and write "
        "results/<machine>.json, .md and plots. Exits with 1 where a gradient disagrees with its "
        "oracle or a case does not run; a missed target is only reported. What the rules learn is "
        "another matter: `python -m benchmarks learning --help`.",
    )
    parser.add_argument("--quick", action="store_true", help="few cases and repeats: three minutes")
    parser.add_argument("--only", metavar="PATTERN", help="cases whose name contains or matches it")
    parser.add_argument("--python", metavar="PATH", help="run under this interpreter as well")
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


def run_all(
    cases: list[Case],
    interpreter: Interpreter,
    platform: str,
    rounds: int,
    seconds: float,
) -> dict[str, Any]:
    """Run cases and print a line for each."""
    found = {}
    for count, case in enumerate(cases, start=1):
        start = time.perf_counter()
        result = run_case(interpreter, case.name, platform, rounds, seconds)
        found[case.name] = result
        print(f"[{count}/{len(cases)}] {time.perf_counter() - start:6.1f} s  {line(result)}")
        sys.stdout.flush()
    return found


def run_other(
    executable: str, cases: list[Case], platform: str, rounds: int, seconds: float
) -> results.Result | None:
    """Run cases under another interpreter; ``None`` if it cannot even say what it is."""
    with other(executable) as interpreter:
        try:
            theirs = run_module(interpreter, "machine")
        except (OSError, RuntimeError) as error:
            print(f"{executable} runs no cases: {str(error).splitlines()[0]}")
            return None
        print(f"other: {markdown.machine_lines(theirs)[0]}")
        return {"machine": theirs, "cases": run_all(cases, interpreter, platform, rounds, seconds)}


def line(result: results.Result) -> str:
    """Return what a case found, in one line."""
    if results.failed(result):
        reason = result.get("error") or f"disagrees: {', '.join(result['disagrees'])}"
        return f"FAILED {result['name']}: {str(reason).splitlines()[0]}"
    held = [row for row in result.get("targets", []) if row["holds"]]
    missed = results.missed(result)
    text = f"{result['name']}: {len(held)} of {len(held) + len(missed)} targets held"
    for row in missed:
        text += f"; {row['name']} {markdown.number(row['value'])}"
    missing = result.get("missing", {})
    return text + (f"; not available: {', '.join(missing)}" if missing else "")


def write(stem: Path, found: results.Result, platform: str) -> None:
    """Write JSON, Markdown and plots."""
    from .catalogue import QUESTIONS, all_cases, explanation, heading

    names = [case.name for case in all_cases(platform)]
    found["cases"] = {name: found["cases"][name] for name in names if name in found["cases"]}
    json_file = stem.with_name(stem.name + ".json")
    results.save(json_file, found)
    try:
        drawn = plots.draw(found, stem)
    except ModuleNotFoundError as error:
        print(error)
        drawn = []
    sections = []
    for question in QUESTIONS:
        members = [name for name in names if name.startswith(f"{question}/")]
        cases = results.in_order(found, members)
        if cases:
            sections.append((heading(question), explanation(question), cases))
    stem.with_name(stem.name + ".md").write_text(markdown.page(found, sections, drawn))
    print(f"written: {json_file} and the .md and plots next to it")


def update_page(stem: Path) -> int:
    """Write the first table of docs/benchmarks.md from results."""
    path = stem.with_name(stem.name + ".json")
    if not path.exists():
        print(f"There are no results of this machine ({path}): run `python -m benchmarks` first.")
        return 1
    markdown.put_into(PAGE, markdown.headline(results.load(path)))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; return the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == [LEARNING]:
        from .learning import command

        return command.main(given[1:])
    options = options_of(given)
    this = run_module(OWN, "machine")
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
    effort = (options.rounds or rounds, options.seconds or seconds)
    found = results.load(stem.with_name(stem.name + ".json"))
    results.renew(found, this)
    own = run_all(cases, OWN, this["platform"], *effort)
    found["cases"] |= own
    if options.python:
        found["other"] = run_other(options.python, cases, this["platform"], *effort)
    write(stem, found, this["platform"])
    return int(any(results.failed(result) for result in own.values()))


if __name__ == "__main__":
    raise SystemExit(main())
