"""The forecasting example uses the past alone, and its network adds what the example says."""

import example_scripts
import numpy as np
import pytest

SIMPLE = ["last value", "season ago", "AR(2)"]


@pytest.fixture(scope="module")
def example():
    return example_scripts.load("forecasting")


def best(example, series, found):
    return min(example.error(series, found[name]) for name in SIMPLE)


@pytest.mark.parametrize("name", ["sunspots", "CO2", "El Niño"])
def test_only_the_past_is_used(example, name):
    """Other values from a step on change no forecast, input or scale up to this step."""
    series, step = example.load_series()[name], 250
    series = series._replace(years=series.years[:300], values=series.values[:300])
    other = series.values.copy()
    other[step:] = 3 * other[step:] + 7
    first, second = (example.baselines(s) for s in (series, series._replace(values=other)))
    for key, forecasts in first.items():
        np.testing.assert_array_equal(forecasts[: step + 1], second[key][: step + 1])
    start, *arrays = example.network_stream(series, first[example.LINEAR])
    again, *others = example.network_stream(series._replace(values=other), second[example.LINEAR])
    assert start == again
    for array, changed, seen in zip(arrays, others, (step + 1, step, step + 1), strict=True):
        np.testing.assert_array_equal(array[: seen - start], changed[: seen - start])


def test_what_was_not_measured_is_a_target_of_nothing(example):
    series = example.load_series()["CO2"]
    missing = np.isnan(series.values)
    assert missing.sum() == 59
    linear = example.baselines(series)[example.LINEAR]
    start, inputs, targets, scale = example.network_stream(series, linear)
    np.testing.assert_array_equal(np.isnan(targets), missing[start:])
    assert np.isfinite(inputs).all()
    assert (scale > 0).all()
