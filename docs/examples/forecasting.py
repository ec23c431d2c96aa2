"""Forecast real time series in one pass: predict a value, observe it, train on it.

statsmodels contains the yearly sunspots since 1700, the weekly carbon dioxide above Mauna Loa (59
weeks are missing) and the monthly temperature of the Pacific off Peru. Recursive least squares on
the last two values and on the season give a first forecast; a recurrent network sees its errors and
learns to correct it online. All values depend on the past only, including scales.

    python docs/examples/forecasting.py

Three seeds of all series take half a minute on two cores, most of it for compilation. Errors in the
table are relative to the best of the last value, the season ago and AR(2).
"""

import argparse
from typing import NamedTuple

import brainstate
import jax.numpy as jnp
import numpy as np
import optax
import statsmodels.datasets
from matplotlib.figure import Figure

import braintrace

HIDDEN = 32
LAGS = 2
WARM_UP = 4  # known errors before the first one is scaled
PRIOR = 10.0
HARMONICS = 3
NETWORK, LINEAR = "AR(2) + season + network", "AR(2) + season"
COLORS = {"AR(2)": "C0", LINEAR: "C1", "AR(9) + season": "C2", NETWORK: "C3"}


# --- data --------------------------------------------------------------------------------


class Series(NamedTuple):
    """Values ``(T,)``, NaN if missing, and properties of the series."""

    unit: str
    years: np.ndarray
    values: np.ndarray
    season: int  # steps
    follows_the_year: bool
    has_trend: bool


def load_series():
    """Return the series by name."""
    data = statsmodels.datasets
    sun = data.sunspots.load_pandas().data
    co2 = data.co2.load_pandas().data.co2
    pacific = data.elnino.load_pandas().data.to_numpy(float)
    weeks = (co2.index.year + co2.index.day_of_year / 365.25).to_numpy()
    months = (pacific[:, :1] + np.arange(12) / 12).ravel()
    spots, temperatures = sun.SUNACTIVITY.to_numpy(float), pacific[:, 1:].ravel()
    return {
        "sunspots": Series("sunspots", sun.YEAR.to_numpy(float), spots, 11, False, False),
        "CO2": Series("CO2 (ppm)", weeks, co2.to_numpy(float), 52, True, True),
        "El Niño": Series("sea surface (°C)", months, temperatures, 12, True, False),
    }


def filled_by_the_last(values):
    """Fill missing values with the last measured one."""
    measured = np.where(np.isnan(values), 0, np.arange(len(values)))
    return values[np.maximum.accumulate(measured)]


# --- forecasts without a network ---------------------------------------------------------


def naive_forecasts(series):
    """Return the last value, plus the change of a season ago (without a trend: its value)."""
    known, season = filled_by_the_last(series.values), series.season
    last, seasonal = np.full((2, len(known)), np.nan)
    last[1:] = known[:-1]
    if series.has_trend:
        seasonal[season + 1 :] = known[season:-1] + known[1:-season] - known[: -season - 1]
    else:
        seasonal[season:] = known[:-season]
    return last, seasonal


def least_squares_forecasts(series, lags, harmonics):
    """Return autoregressive forecasts with sines and cosines of the season, fitted to the past.

    The fit is recursive least squares. A forecast replaces a missing value, without an update. A
    series with a trend is predicted by its differences.
    """
    terms = seasonal_terms(series, harmonics)
    values = series.values.copy()
    values[: lags + 1] = filled_by_the_last(values)[: lags + 1]
    forecasts = np.full(len(values), np.nan)
    weights = np.zeros(terms.shape[1] + lags)
    weights[0] = not series.has_trend  # at first: as the last value
    covariance = PRIOR * np.eye(len(weights))
    for t in range(lags + 1, len(values)):
        last = values[t - lags - 1 : t][::-1]
        base, past = (last[0], -np.diff(last)) if series.has_trend else (0.0, last[:lags])
        x = np.concatenate([past, terms[t]])
        forecasts[t] = base + x @ weights
        if np.isnan(values[t]):
            values[t] = forecasts[t]
        elif not np.isnan(series.values[t - lags - 1 : t]).any():
            gain = covariance @ x / (1 + x @ covariance @ x)
            weights += gain * (values[t] - forecasts[t])
            covariance -= np.outer(gain, x @ covariance)
    return forecasts


def seasonal_terms(series, harmonics):
    """Return ones ``(T, 1)``, with sines and cosines if the season follows the year."""
    angles = 2 * np.pi * series.years[:, None] * np.arange(1, harmonics + 1)
    one = np.ones((len(angles), 1))
    if not series.follows_the_year:
        return one
    return np.concatenate([one, np.sin(angles), np.cos(angles)], axis=1)


def baselines(series):
    """Return forecasts ``(T,)`` by name, each from the past only."""
    last, seasonal = naive_forecasts(series)
    return {
        "last value": last,
        "season ago": seasonal,
        "AR(2)": least_squares_forecasts(series, 2, 0),
        LINEAR: least_squares_forecasts(series, LAGS, HARMONICS),
        "AR(9) + season": least_squares_forecasts(series, 9, HARMONICS),
    }


# --- the network -------------------------------------------------------------------------


class Corrector(brainstate.nn.Module):
    """A gated recurrent network whose readout starts at zero: no correction at first."""

    def __init__(self, inputs):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(inputs, HIDDEN)
        self.readout = brainstate.nn.Linear(HIDDEN, 1, w_init=brainstate.nn.init.ZeroInit())

    def update(self, x):
        return self.readout(self.cell(x))


def scaled(values):
    """Subtract the running mean from every value, and divide by the running deviation."""
    counts = np.arange(1, len(values) + 1)
    mean, square = np.cumsum(values) / counts, np.cumsum(values**2) / counts
    return (values - mean) / np.sqrt(np.maximum(square - mean**2, 1e-6 * square + 1e-12))


def recent_size(errors):
    """Return the root mean square of previous errors, with decaying weights."""
    square, sizes = np.nan, []
    for error in errors:
        if not np.isnan(error):
            square = error**2 if np.isnan(square) else 0.97 * square + 0.03 * error**2
        sizes.append(np.sqrt(square))
    return np.array(sizes)


def network_stream(series, linear):
    """Return the inputs and targets of the network.

    Returns
    -------
    start, inputs, targets, scale
        ``inputs[i]`` contains the known values before step ``start + i``: the last error of the
        linear forecast, change and value, scaled. ``targets[i]`` is the error of the linear
        forecast at that step, in units of ``scale[i]``, the size of its previous errors.
    """
    values = np.where(np.isnan(series.values), linear, series.values)
    errors = series.values - linear
    size = recent_size(errors)
    start = np.flatnonzero(~np.isnan(errors))[WARM_UP]
    known = slice(start - 1, -1)
    error = np.nan_to_num(errors) / size
    change, value = scaled(np.diff(values, prepend=values[0])), scaled(values)
    inputs = np.clip(np.stack([error, change, value], axis=1)[known], -5, 5)
    return start, inputs, errors[start:] / size[known], size[known]


def network_forecasts(series, linear, seed=0):
    """Correct linear forecasts by a network that trains online."""
    start, inputs, targets, scale = network_stream(series, linear)
    xs = jnp.asarray(inputs[:, None], jnp.float32)
    ys = jnp.asarray(np.nan_to_num(targets)[:, None, None], jnp.float32)
    measured = jnp.asarray(~np.isnan(targets), jnp.float32)

    brainstate.random.seed(seed)
    learner = braintrace.compile(Corrector(xs.shape[-1]), "d_rtrl", xs[0], batch_size=1)

    def step_fn(x, y):
        correction = learner(x)
        return optax.huber_loss(correction, y, delta=2.0).mean(), correction

    rate = lambda step: 0.01 / jnp.sqrt(1 + step / 300)  # noqa: E731
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    # Each correction uses the weights before the update of its step: a forecast.
    _, corrections = learner.etrace_online(
        xs, ys, step_fn=step_fn, optimizer=optimizer, mask=measured, has_aux=True
    )
    return np.concatenate([linear[:start], linear[start:] + scale * corrections[:, 0, 0]])


# --- results -----------------------------------------------------------------------------


def squared_errors(series, forecasts):
    """Return squared errors after the first tenth of a series, NaN if missing."""
    return ((forecasts - series.values) ** 2)[len(series.values) // 10 :]


def error(series, forecasts):
    """Return the root mean square error of forecasts."""
    return np.sqrt(np.nanmean(squared_errors(series, forecasts)))


def forecast(series, seeds):
    """Return forecasts by name: the baselines' ``(T,)``, the network's ``(seeds, T)``."""
    found = baselines(series)
    return found | {NETWORK: np.stack([network_forecasts(series, found[LINEAR], s) for s in seeds])}


def tell(name, series, found):
    """Print a table of errors, also in relation to the best of the simple baselines."""
    simple = min(error(series, found[key]) for key in ("last value", "season ago", "AR(2)"))
    print(f"\n{name}: {np.isfinite(series.values).sum()} values of {series.unit}")
    print(f"{'forecast':26}{'RMS error':>10}{'relative':>10}")
    for key, forecasts in found.items():
        for row in np.atleast_2d(forecasts):
            size = error(series, row)
            print(f"{key:26}{size:10.3f}{size / simple:10.3f}")


def draw(found_of, all_series, path):
    """Plot the end of each series with its forecasts, and errors so far."""
    figure = Figure(figsize=(9, 2.3 * len(found_of)), layout="constrained", facecolor="white")
    rows = figure.subplots(len(found_of), 2, squeeze=False)
    for (name, found), (left, right) in zip(found_of.items(), rows, strict=True):
        draw_forecasts(left, all_series[name], found)
        draw_errors(right, all_series[name], found)
        left.set_title(name)
        for axes in (left, right):
            axes.grid(alpha=0.3)
    for axes in rows[0]:
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=80)


def draw_forecasts(axes, series, found):
    shown = slice(-8 * series.season, None)
    years = series.years[shown]
    axes.plot(years, series.values[shown], "k.", markersize=4, label="measured")
    axes.plot(years, found[NETWORK][0][shown], color=COLORS[NETWORK], lw=1, label="forecast")
    axes.set(ylabel=series.unit)


def draw_errors(axes, series, found):
    reference = np.nancumsum(squared_errors(series, found["AR(2)"]))
    for key, color in COLORS.items():
        for row in np.atleast_2d(found[key]):
            ratio = np.sqrt(np.nancumsum(squared_errors(series, row)) / reference)
            shown = len(ratio) * 9 // 10  # the first ratios are noisy
            axes.plot(series.years[-shown:], ratio[-shown:], color=color, lw=1)
        axes.plot([], [], color=color, label=key)
    axes.set(ylabel="RMS error so far\nin relation to AR(2)")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    all_series = load_series()
    add("--series", nargs="+", choices=list(all_series), default=list(all_series))
    add("--seeds", type=int, default=3, help="networks with other initial weights")
    add("--out", default="forecasting.png", help="where the picture goes")
    options = parser.parse_args(arguments)
    found_of = {}
    for name in options.series:
        found_of[name] = forecast(all_series[name], range(options.seeds))
        tell(name, all_series[name], found_of[name])
    draw(found_of, all_series, options.out)
    return found_of


if __name__ == "__main__":
    main()
