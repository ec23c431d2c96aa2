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


@pytest.mark.nightly
def test_the_network_corrects_what_least_squares_leave(example):
    series = example.load_series()["sunspots"]
    found = example.baselines(series)
    corrected = example.network_forecasts(series, found[example.LINEAR])
    assert example.error(series, corrected) < 0.96 * best(example, series, found)


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


@pytest.mark.nightly
def test_margins(example, tmp_path, capsys):
    """At least 5, 24 and 22 % better than the best simple forecast, with each of three seeds."""
    picture = tmp_path / "forecasting.png"
    found_of = example.main(["--out", str(picture)])
    all_series = example.load_series()
    for name, reached in {"sunspots": 0.95, "CO2": 0.76, "El Niño": 0.78}.items():
        series, found = all_series[name], found_of[name]
        assert len(found[example.NETWORK]) == 3
        for forecasts in found[example.NETWORK]:
            assert example.error(series, forecasts) < reached * best(example, series, found)
    series, found = all_series["CO2"], found_of["CO2"]
    for forecasts in found[example.NETWORK]:
        assert example.error(series, forecasts) < example.error(series, found[example.LINEAR])
    assert capsys.readouterr().out.count(example.NETWORK) == 9
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_forecasts_of_the_network_use_the_past_alone(example):
    series = example.load_series()["sunspots"]
    other = series.values.copy()
    other[200:] += 50
    first, second = (
        example.network_forecasts(s, example.baselines(s)[example.LINEAR])
        for s in (series, series._replace(values=other))
    )
    np.testing.assert_array_equal(first[:201], second[:201])
    assert not np.array_equal(first[201], second[201])
