"""What runs by day is written in the rows: a new model moves nothing of the others."""

import os
import subprocess
import sys

import by_day
import more_models
import places
import pytest

pytest_plugins = ("pytester",)

ROOT = places.ROOT
ROWS = """
    import pytest

    @pytest.mark.by_day("b", "c")
    @pytest.mark.parametrize("row", {})
    def test_it(row):
        pass
    """


def nightly(pytester, rows):
    """{row: whether it is of the night}, and the errors of collecting."""
    pytester.makepyfile(ROWS.format(rows))
    options = ["--collect-only", "-o", "markers=by_day\nnightly"]
    record = pytester.inline_run(*options, plugins=[by_day])
    items = [call.item for call in record.getcalls("pytest_itemcollected")]
    found = {item.callspec.id: bool(item.get_closest_marker("nightly")) for item in items}
    return found, [str(report.longrepr) for report in record.getfailedcollections()]


def test_rows_that_are_not_named_are_of_the_night(pytester):
    found, errors = nightly(pytester, ["a", "b", "c"])
    assert (found, errors) == ({"a": True, "b": False, "c": False}, [])


def test_a_name_of_no_row_is_an_error(pytester):
    found, (error,) = nightly(pytester, ["a", "b"])
    assert found == {}
    assert "`by_day` of test_it names no row of it: ['c']" in error


def collected(files, *options):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n0", *options, *files]
    environment = {**os.environ, "PYTHONPATH": places.SEARCHED}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:]
    return {line for line in run.stdout.splitlines() if "::" in line}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "files",
    [
        ["tests/rules/test_dense_oracle.py", "tests/models/test_zoo.py"],
        pytest.param(["tests"], marks=pytest.mark.nightly),
    ],
    ids=["two files", "all"],
)
def test_a_new_model_moves_no_row_of_the_others(files):
    before, after = collected(files), collected(files, "-p", "more_models")
    new = {row for row in after if more_models.NAME in row}
    assert after - new == before
    assert new
