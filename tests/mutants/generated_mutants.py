"""Small faults all over the library, of which each package's tests must notice 85 in a hundred.

    python tests/mutants/generated_mutants.py      a sample of 300
    python tests/mutants/generated_mutants.py --share 1/6    a sixth of it
    python tests/mutants/generated_mutants.py --package nn --quick --number 20
    python tests/mutants/generated_mutants.py --quick --seconds 60    no suite
    python tests/mutants/generated_mutants.py --report    what has been found so far

Each mutant (`mutants.py`) is put into a copy of the repository. Tests that reach its function run
first, the quickest before others; where none fails, the whole fast suite runs. Which tests reach a
function is found out once, by a run of the suite without faults, and kept in the file of `--map`.
Results are added to the file of `--results`; a mutant that is in it does not run again, and files
of several machines can be joined by `cat`. The status is 1 if the tests of a package notice too few
of at least 20, not counting those of `mutant_equivalents.py`.
"""

import argparse
import collections
import datetime
import hashlib
import json
import os
import pathlib
import sys
import tempfile
import time

from mutant_equivalents import EQUIVALENT
from mutants import MINIMUM, PACKAGES, every_mutant, sample, text_of
from mutation_runs import FAILED, PASSED, ROOT, copy_everything, run_pytest

NEEDED = 0.85
FIRST_TESTS = 12
FIRST_SECONDS = 60.0
LIBRARY = ROOT / "braintrace"


# --- which tests reach a function ---------------------------------------------------------------


def make_map(file, folder, arguments):
    """Run tests in a copy without faults, and keep which functions each reaches."""
    with tempfile.TemporaryDirectory() as parts:
        options = ["-q", "-p", "reached_functions", *arguments]
        tests = os.pathsep.join(
            str(folder / name) for name in ("", "tests/mutants", "tests/support")
        )
        status, printed = run_pytest(folder, options, REACHED=parts, PYTHONPATH=tests)
        if status != PASSED:
            sys.exit(f"The tests do not pass without a fault:\n{printed[-3000:]}")
        files = pathlib.Path(parts).iterdir()
        lines = [json.loads(s) for p in files for s in p.read_text().splitlines()]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(condensed(lines), indent=0))


def condensed(lines):
    """{function: [[test, seconds], ...]}, of each test its quickest row, the quickest first."""
    quickest = collections.defaultdict(dict)
    for line in lines:
        test, seconds = line["test"], line["seconds"]
        for function in line["ran"]:
            known = quickest[function].get(test.split("[")[0])
            if known is None or seconds < known[1]:
                quickest[function][test.split("[")[0]] = [test, round(seconds, 3)]
    return {name: sorted(found.values(), key=lambda t: t[1]) for name, found in quickest.items()}


def tests_for(reached, function, limit=None):
    """Return the tests to run first, and the files of all tests that reach a function.

    For what runs when a module is imported, these are the tests of all functions of its file.

    limit: seconds of the first tests, however many they are; the quickest few if not given.
    """
    found = reached.get(function, [])
    if not found:
        file = function.split(":")[0] + ":"
        found = [test for name, own in reached.items() if name.startswith(file) for test in own]
        found = sorted({test: (test, s) for test, s in found}.values(), key=lambda t: t[1])
    first, seconds = [], 0.0
    for test, own in found[: FIRST_TESTS if limit is None else None]:
        if first and seconds + own > (FIRST_SECONDS if limit is None else limit):
            break
        first.append(test)
        seconds += own
    return first, list(dict.fromkeys(test.split("::")[0] for test, _ in found))


# --- one mutant ---------------------------------------------------------------------------------


def try_out(mutant, folder, reached, options):
    """Return what the tests say of one mutant, as a line of the results."""
    path = folder / "braintrace" / mutant.file
    text = path.read_text()
    assert text == text_of(LIBRARY, mutant)
    start = time.perf_counter()
    path.write_text(mutant.changed(text))
    try:
        result, by = noticed(folder, *tests_for(reached, mutant.function, options.seconds), options)
    finally:
        path.write_text(text)
    seconds = round(time.perf_counter() - start, 1)
    return {"key": key_of(mutant), "name": mutant.name, "result": result, "by": by} | {
        "seconds": seconds
    }


def noticed(folder, first, files, options):
    """Return `killed`, `timeout` or `survived`, and the test that failed."""
    stages = [["-n0", *first]] if first else []
    if not options.quick:
        stages.append([f"-n={options.processes}", *files, "tests", "braintrace"])
    for stage in stages:
        status, printed = run_pytest(folder, ["-q", "-x", *stage], timeout=options.timeout)
        if status is None:
            return "timeout", ""
        if status != PASSED:
            failed = [s for s in printed.split("\n") if s.startswith(("FAILED", "ERROR"))]
            return "killed", failed[0][:300] if failed else f"status {status}"
    return "survived", ""


def key_of(mutant):
    """Name a mutant of this state of its file: where the lines differ, it runs again."""
    changed = mutant.diff(text_of(LIBRARY, mutant)).split("\n")[1:]
    return hashlib.sha256("\n".join([mutant.name, *changed]).encode()).hexdigest()[:16]


# --- all of them --------------------------------------------------------------------------------


def read_results(file):
    lines = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {line["key"]: line for line in lines}


def run(mutants, options):
    """Try out those that have no result yet, as long as there is time."""
    known, start = read_results(options.results), time.perf_counter()
    missing = [m for m in mutants if key_of(m) not in known and m.name not in EQUIVALENT]
    if not missing:
        return
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        copy_everything(folder)
        reached = ready_map(folder, missing, options)
        for mutant in missing:
            if options.budget is not None and time.perf_counter() - start > options.budget:
                print("The budget is spent.")
                return
            line = try_out(mutant, folder, reached, options)
            with options.results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{line['result']:8} {line['seconds']:5.0f} s  {mutant.name}", flush=True)


def ready_map(folder, mutants, options):
    """Return the map; a run without a fault must pass, else every mutant would seem noticed."""
    if not options.map.exists():
        make_map(options.map, folder, options.map_tests.split())
        return json.loads(options.map.read_text())
    reached = existing(json.loads(options.map.read_text()), folder)
    first = (tests_for(reached, m.function, options.seconds)[0] for m in mutants)
    tests = dict.fromkeys(test for own in first for test in own)
    stages = [["-n0", *tests]] if options.quick else [["-n0", *tests], [f"-n={options.processes}"]]
    for stage in stages:
        status, printed = run_pytest(folder, ["-q", "-x", *stage])
        if status != PASSED:
            sys.exit(f"The tests do not pass without a fault:\n{printed[-3000:]}")
    return reached


def existing(reached, folder):
    """Return a map without tests that have gone since it was made."""
    _, printed = run_pytest(folder, ["-q", "-n0", "--collect-only"])
    tests = {*printed.split("\n")}
    return {name: [pair for pair in found if pair[0] in tests] for name, found in reached.items()}


def report(mutants, options):
    """Print the share that is noticed of each package, and the survivors; whether it is enough."""
    known, enough = read_results(options.results), True
    for package in options.packages:
        own = [m for m in mutants if m.package == package and m.name not in EQUIVALENT]
        lines = {m: known[key_of(m)] for m in own if key_of(m) in known}
        survivors = [m for m, line in lines.items() if line["result"] == "survived"]
        if not lines:
            print(f"{package:12} none of {len(own)} tried out")
            continue
        share = 1 - len(survivors) / len(lines)
        is_judged = len(lines) >= min(MINIMUM, len(own))
        enough = enough and (share >= NEEDED or not is_judged)
        mean = sum(line["seconds"] for line in lines.values()) / len(lines)
        counts = f"{len(lines)} tried ({len(own)} chosen)"
        print(f"{package:12} {share:4.0%} killed of {counts}, {mean:.0f} s each")
        for mutant in survivors:
            print(f"  survived: {mutant.name}")
            print("    " + mutant.diff(text_of(LIBRARY, mutant)).replace("\n", "\n    "))
    return enough


def share_of(text, today=None):
    """Read ``i/n``; ``tonight/n`` takes one share after the other, a night each."""
    number, count = text.split("/")
    if number == "tonight":
        number = (today or datetime.date.today()).toordinal() % int(count) + 1
    if not 1 <= int(number) <= int(count):
        raise argparse.ArgumentTypeError(f"{text} is no share: give 1/{count} to {count}/{count}")
    return int(number) - 1, int(count)


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=300, help="mutants in the sample")
    parser.add_argument("--seed", type=int, default=0, help="which sample")
    parser.add_argument("--package", action="append", choices=PACKAGES, dest="packages")
    parser.add_argument("--share", type=share_of, default=(0, 1), help="i/n, or tonight/n")
    parser.add_argument("--budget", type=float, help="seconds after which no mutant is begun")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds of one run of tests")
    parser.add_argument("--processes", default="auto", help="of the whole suite, as pytest's -n")
    parser.add_argument("--quick", action="store_true", help="only the tests that come first")
    parser.add_argument("--seconds", type=float, help="of the tests that come first, by the map")
    folder = ROOT / "build" / "mutants"
    parser.add_argument("--results", type=pathlib.Path, default=folder / "results.jsonl")
    parser.add_argument("--map", type=pathlib.Path, default=folder / "map.json")
    parser.add_argument("--map-tests", default="", help="arguments of pytest for making the map")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    options.packages = options.packages or list(PACKAGES)
    return options


def main():
    options = parse(None)
    mutants = sample(every_mutant(LIBRARY, options.packages), options.number, options.seed)
    share, count = options.share
    if not options.report:
        run(mutants[share::count], options)
    sys.exit(PASSED if report(mutants, options) else FAILED)


if __name__ == "__main__":
    main()
