"""Command line of the scaling model: ``python -m benchmarks.scaling --help``."""

import argparse
from pathlib import Path

from .. import results
from ..processes import OWN, PACKAGE, run_module
from . import page

COUNTED = results.FOLDER / "scaling.json"
PAGE = PACKAGE.parent / "docs" / "_generated" / "scaling.md"


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description="Count operations, bytes and messages, write results/scaling.json, and from "
        "that docs/_generated/scaling.md.",
    )
    parser.add_argument("--page", action="store_true", help="write the page from stored counts")
    parser.add_argument("--docs", type=Path, default=PAGE.parent, help="folder of the page")
    options = parser.parse_args(arguments)
    if not options.page:
        results.save(COUNTED, run_module(OWN, "scaling.counted"))
    counted = results.load(COUNTED)
    (options.docs / PAGE.name).write_text(page.page(counted))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
