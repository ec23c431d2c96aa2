"""What runs by day is written in the rows: a new model moves nothing of the others."""

import by_day

pytest_plugins = ("pytester",)

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
