"""A plugin of pytest that writes down which functions of the library each test runs.

    REACHED=folder pytest -p reached_functions

Each process leaves a file in the folder: one line of JSON a test, with its seconds and the names of
the functions that ran.
"""

import json
import os
import pathlib
import sys
import threading
import time

import pytest

LIBRARY = str(pathlib.Path(__file__).resolve().parents[2] / "braintrace") + os.sep

_known: dict[object, str | None] = {}
_now: set[str] = set()


def _name(code):
    """``file:function`` of a function of the library, as mutants are named; else `None`."""
    if not code.co_filename.startswith(LIBRARY):
        return None
    parts = [p for p in code.co_qualname.split(".") if not p.startswith("<")]
    return f"{code.co_filename[len(LIBRARY) :]}:{'.'.join(parts) or '<module>'}"


def _called(frame, event, _):
    if event == "call":
        code = frame.f_code
        name = _known[code] if code in _known else _known.setdefault(code, _name(code))
        if name is not None:
            _now.add(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    _now.clear()
    start = time.perf_counter()
    threading.setprofile(_called)
    sys.setprofile(_called)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        line = {"test": item.nodeid, "seconds": time.perf_counter() - start, "ran": sorted(_now)}
        worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
        with open(pathlib.Path(os.environ["REACHED"]) / f"{worker}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
