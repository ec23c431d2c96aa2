"""Examples that hypothesis draws: the same ones at every run, few by day and many at night."""

import hypothesis
import pytest


def by_day_and_night(day, night):
    """Give a test its number of examples."""
    rows = [pytest.param(day, id="few"), pytest.param(night, id="many", marks=pytest.mark.nightly)]
    return pytest.mark.parametrize("examples", rows)


def drawn(examples, *strategies, **options):
    """Call a function with examples, as a decorator; return nothing."""
    same = hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        **options,
    )
    return lambda check: same(hypothesis.given(*strategies)(check))()
