"""Which rows of a test run by day: those that the test names."""

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, name):
    """Mark the rows of a test that its `by_day` does not name as `nightly`."""
    rows = yield
    mark = isinstance(rows, list) and rows and rows[0].get_closest_marker("by_day")
    if mark:
        by_id = {row.callspec.id: row for row in rows if hasattr(row, "callspec")}
        unknown = sorted({*mark.args} - {*by_id})
        if unknown:
            raise collector.CollectError(f"`by_day` of {name} names no row of it: {unknown}")
        for row_id in by_id.keys() - {*mark.args}:
            by_id[row_id].add_marker(pytest.mark.nightly)
    return rows
