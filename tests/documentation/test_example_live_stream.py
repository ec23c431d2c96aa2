"""Forecasts of the example with late labels are better than persistence."""

import example_scripts
import pytest

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_forecasts_are_better_than_persistence(seed):
    network, persistence = example_scripts.load("live_stream").run(seed=seed)
    assert network < 0.6 * persistence
