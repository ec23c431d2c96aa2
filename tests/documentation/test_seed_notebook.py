"""The notebook that fixes the interface runs cell by cell with the output that it stored."""

import subprocess
import sys

import places
import pytest

SCRIPT = places.ROOT.parent / "shared" / "acceptance" / "seed_notebook.py"


@pytest.mark.skipif(
    not SCRIPT.exists(), reason="the notebook lies beside the repository, and not everywhere"
)
def test_every_cell_prints_what_is_stored():
    # A process of its own, because the notebook registers operations.
    result = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "21 of 21 cells agree"
