"""Results of one machine as a JSON file."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
Result = dict[str, Any]


def load(path: Path) -> Result:
    """Return earlier results of a machine; empty ones where there are none."""
    found: Result = json.loads(path.read_text()) if path.exists() else {"machine": {}, "cases": {}}
    return found


def save(path: Path, results: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def renew(results: Result, machine: Result) -> None:
    """Let results be those of a machine as it is now; cases that are not run again say so."""
    if results["machine"] != machine:
        for case in results["cases"].values():
            case.setdefault("machine", results["machine"])
    results["machine"] = machine
