"""Faults put into important lines of the library, each of which some test must notice.

    python tests/mutants/mutations.py            all of them
    python tests/mutants/mutations.py NAME...    some

`mutations.txt` has them. Each is put into a copy of the repository, in which the tests named for it
then run. One that they do not notice survives, and the script fails; so it does where a line is no
longer as it is written there, or a test fails or is missing without any fault.
"""

import argparse
import dataclasses
import pathlib
import sys
import tempfile
import time

from mutation_runs import FAILED, PASSED, copy_repository, run_tests


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One fault: a text that is in a file once, what replaces it, and tests that notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def read(path):
    """Return the faults of a file.

    It has a line ``== file`` before those of a file in `braintrace/`. Each begins with
    ``# name: what goes wrong``; the lines behind ``-`` are replaced by those behind ``+``, and a
    test behind each ``@`` notices it.
    """
    found, file = [], None
    for line in path.read_text().splitlines():
        kind, text = line[0], line[1:]
        if kind == "=":
            file = text.removeprefix("= ")
        elif kind == "#":
            found.append((file, text.partition(": ")[0].strip(), {"-": [], "+": [], "@": []}))
        else:
            found[-1][2][kind].append(text)
    return [
        Mutation(
            name, file, "\n".join(parts["-"]), "\n".join(parts["+"]), tuple(map(_path, parts["@"]))
        )
        for file, name, parts in found
    ]


def _path(test):
    """Return a test as pytest takes it."""
    test = test.strip()
    return test if test.startswith("braintrace/") else f"tests/{test}"


MUTATIONS = read(pathlib.Path(__file__).with_suffix(".txt"))


class NotKilledError(Exception):
    """A mutation that no test noticed, or that could not be tried out."""


def try_out(mutation, folder):
    """Put one fault into the copy, run its tests, and take it out again.

    Raises
    ------
    NotKilledError
        If the text is not there once, or no test notices.
    """
    path = folder / "braintrace" / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise NotKilledError(f"{mutation.file} has its text {text.count(mutation.old)} times")
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        status, printed = run_tests(folder, mutation.tests)
    finally:
        path.write_text(text)
    if status == PASSED:
        raise NotKilledError("SURVIVED")
    if status != FAILED:
        raise NotKilledError(f"its tests did not run:\n{printed}")


def chosen(names):
    known = {mutation.name: mutation for mutation in MUTATIONS}
    unknown = [name for name in names if name not in known]
    if unknown or len(known) < len(MUTATIONS):
        sys.exit(f"Not a mutation, or not one alone: {', '.join(unknown)}")
    return [known[name] for name in names] or MUTATIONS


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations; all without any")
    mutations = chosen(parser.parse_args().names)
    failures = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        copy_repository(folder)
        tests = dict.fromkeys(test for mutation in mutations for test in mutation.tests)
        status, printed = run_tests(folder, tests)
        if status != PASSED:
            sys.exit(f"The tests do not pass without a fault:\n{printed}")
        for mutation in mutations:
            start = time.perf_counter()
            try:
                try_out(mutation, folder)
                found = "killed"
            except NotKilledError as error:
                found = str(error)
                failures.append(mutation.name)
            print(f"{found:9} {time.perf_counter() - start:4.0f} s  {mutation.name}", flush=True)
    print(f"{len(mutations) - len(failures)} of {len(mutations)} killed")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
