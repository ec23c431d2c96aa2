"""Gradients while the parameters change: exact where nothing is old, and less so where it is."""

import dataclasses

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.learning import command, online_updates, record, study, tasks, work
from benchmarks.learning.networks import build, values_of

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


@pytest.mark.nightly
def test_updates_make_traces_old(monkeypatch, tmp_path):
    monkeypatch.setattr(online_updates, "_begun", initial)
    found = online_updates.run(SETTINGS, {"name": "a machine"})
    exact, own = (
        {name: np.array(values)[..., 0] for name, values in found.gradients[rule].items()}
        for rule in SETTINGS.rules
    )
    for name in ("cosine_to_rtrl", "norm_to_rtrl"):
        np.testing.assert_allclose(exact[name], 1, atol=1e-5)
    for name in ("cosine_to_bptt", "norm_to_bptt"):
        old, *still = exact[name][0, 1], exact[name][0, 0], *exact[name][1]
        np.testing.assert_allclose(still, 1, atol=1e-4)  # no rate, or no update
        assert abs(old - 1) > 0.003
    unchanged = own["cosine_to_rtrl"][0, 0]
    assert 0.3 < unchanged < 0.999
    np.testing.assert_allclose(own["cosine_to_rtrl"][1], unchanged, atol=1e-4)
    np.testing.assert_allclose(own["cosine_to_bptt"][1], unchanged, atol=1e-4)
    assert np.ptp(np.array(found.loss)[:, 0]) < 1e-6 < np.ptp(np.array(found.loss)[:, 1])

    record.write(tmp_path, found)
    assert record.is_done(tmp_path, SETTINGS)
    assert not record.is_done(tmp_path, dataclasses.replace(SETTINGS, steps=2 * STEPS))
    assert not list(record.read_all(tmp_path))
    (kept,) = study.load(tmp_path)
    assert kept.mean("immediate", "cosine_to_rtrl", 1, 0.0) == pytest.approx(unchanged, abs=1e-3)
    outcome = SETTINGS, found, ""
    assert command.line(outcome).startswith("online-updates-copy-with-lag-leaky: compile")


@pytest.mark.nightly
def test_a_study_of_a_network_that_has_begun_to_learn(tmp_path):
    settings = dataclasses.replace(SETTINGS, rules=online_updates.RULES, cell="gru", begun=20)
    ((_, found, reason),) = work.make(work.train, [settings], tmp_path, workers=1)
    assert found is not None, reason
    measures = [np.array(found.gradients[rule]["cosine_to_bptt"]) for rule in settings.rules]
    assert np.isfinite(measures).all() and np.abs(measures).max() < 1 + 1e-5
    assert record.is_done(tmp_path, settings)
