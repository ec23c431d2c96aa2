"""Where the repository and its parts are, for tests and for the programs that they start."""

import os
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
DOCS = ROOT / "docs"
SEARCHED = os.pathsep.join(map(str, [ROOT, ROOT / "tests", SUPPORT]))
"""The `PYTHONPATH` of a program that imports the library and the models of the tests."""
