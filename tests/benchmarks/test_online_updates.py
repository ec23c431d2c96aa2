"""Gradients during online updates: exact with fresh traces, approximate with stale ones."""

import dataclasses

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.learning import online_updates, tasks
from benchmarks.learning.networks import build, values_of
from benchmarks.learning.streams import Streams

pytestmark = pytest.mark.nightly

STEPS = 14
SETTINGS = online_updates.Settings(
    "copy with lag",
    "leaky",
    units=3,
    batch=2,
    steps=STEPS,
    points=2,
    rates=(0.0, 0.3),
    every=(1, STEPS + 1),
    seeds=(0,),
    rules=("rtrl", "immediate"),
)


def initial(settings):
    """Weights of all seeds without any training."""
    models = [build(tasks.load(settings.task), settings.cell, settings.units, settings.seeds[0])]
    weights = [values_of(model, brainstate.ParamState) for model in models]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)


def test_updates_make_traces_stale(monkeypatch):
    monkeypatch.setattr(online_updates, "_begun", initial)
    streams = Streams(online_updates.run(SETTINGS))

    def mean(what, method, every, rate):
        return streams.mean(what, "copy with lag", "leaky", method, every, rate)

    late = STEPS + 1
    places = [(every, rate) for every in (1, late) for rate in (0.0, 0.3)]
    np.testing.assert_allclose([mean("to_rtrl", "rtrl", *p) for p in places], 1, atol=1e-5)
    still = [mean("to_bptt", "rtrl", *place) for place in places if place != (1, 0.3)]
    np.testing.assert_allclose(still, 1, atol=1e-4)  # no rate, or no update
    assert abs(mean("to_bptt", "rtrl", 1, 0.3) - 1) > 0.003
    unchanged = mean("to_rtrl", "immediate", 1, 0.0)
    assert 0.3 < unchanged < 0.999
    for what in ("to_rtrl", "to_bptt"):
        found = [mean(what, "immediate", late, rate) for rate in (0.0, 0.3)]
        np.testing.assert_allclose(found, unchanged, atol=1e-4)
    loss = {place: mean("loss", "rtrl", *place) for place in places}
    assert abs(loss[1, 0.0] - loss[late, 0.0]) < 1e-6
    assert abs(loss[1, 0.3] - loss[late, 0.3]) > 1e-6


def test_a_study_of_a_network_that_has_begun_to_learn():
    settings = dataclasses.replace(SETTINGS, rules=online_updates.RULES, cell="gru", begun=20)
    found = online_updates.run(settings)
    assert len(found) == 4 * len(settings.rules)
    cosines = np.array([row.to_bptt for row in found], float)
    assert np.isfinite(cosines).all()
    assert np.abs(cosines).max() < 1 + 1e-5
