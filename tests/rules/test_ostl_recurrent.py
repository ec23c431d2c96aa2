"""OSTL is RTRL of each layer by itself: its recursion, written out; of one layer, BPTT."""

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import references
from assertions import assert_gradients_close, assert_gradients_differ
from drivers import build_learner, sequence_gradient
from test_rtrl import CHANGES, Population

import braintrace

LENGTH, TOLERANCE = 6, 1e-10
STACKS = {
    "TwoLayers": {"lower": ("lower/h",), "upper": ("upper/h",)},
    "TwoLayersPlainLink": {"lower": ("lower",), "upper": ("upper",)},
}

pytestmark = pytest.mark.usefixtures("float64")


def gradients(case, style="batch axis", masks=(None, None), sizes=(1, 3)):
    """By two chunk sizes, from one learner."""
    learner = build_learner(case, "ostl_recurrent", style, dtype=np.float64)
    xs, targets = map(np.asarray, case.sequences(2, LENGTH, np.float64))
    for chunk, mask in zip(sizes, masks, strict=True):
        learner.reset_state(2)
        yield sequence_gradient(learner, case, xs, targets, chunk_size=chunk, mask=mask)


def ostl_of(case, **options):
    arguments = jax.tree.map(np.asarray, references.arguments(case))
    return oracles.dense_ostl(case, *arguments, STACKS[case.name], **options)


@pytest.mark.parametrize(
    ("name", "style", "sizes"),
    [
        pytest.param("TwoLayers", "mapped", (1, 3), id="TwoLayers-mapped"),
        # and a last chunk of two steps
        pytest.param(
            "TwoLayersPlainLink", "batch axis", (1, 4), id="TwoLayersPlainLink-batch axis"
        ),
    ],
)
def test_layers_are_apart_over_time(name, style, sizes):
    case, mask = catalogue.BY_NAME[name], np.array([1, 0, 2, 0.5, 1, 0])
    expected = ostl_of(case)
    with pytest.warns(braintrace.ApproximationWarning, match="for earlier values of"):
        whole, masked = gradients(case, style, masks=(None, mask), sizes=sizes)
    assert_gradients_close(whole, expected, TOLERANCE, name)
    assert_gradients_differ(whole, references.bptt(case), 1e-3, name)
    assert_gradients_close(masked, ostl_of(case, step_weights=mask), TOLERANCE, name)


def test_each_weight_has_a_trace_for_its_own_layer():
    with pytest.warns(braintrace.ApproximationWarning):
        learner = build_learner(catalogue.BY_NAME["TwoLayers"], "ostl_recurrent", dtype=np.float64)
    shapes = {name: leaf.shape for name, leaf in learner.algorithm.traces.value.items()}
    assert shapes == {"lower/w": (2, 4, 3, 4), "upper/w": (2, 5, 4, 5)}


def test_between_layers_strict_finds_what_is_left_out():
    case = catalogue.BY_NAME["TwoLayers"]
    with pytest.raises(braintrace.CompilationError, match="for earlier values"):
        build_learner(case, "ostl_recurrent", strict=True)


def test_what_rtrl_refuses_is_refused():
    model = Population(lambda h, y, b: 0.5 * (h - h.mean(0)) + y + b)
    with pytest.raises(braintrace.CompilationError, match=r"`OSTLRecurrent` .*over the batch"):
        braintrace.compile(model, "ostl_recurrent", jnp.ones((2, 3)), batch_size=2)
    model = Population(CHANGES["plain"])
    learner = braintrace.compile(model, "ostl_recurrent", jnp.ones((2, 3)), batch_size=2)
    assert learner.graph.flat_state.samples == 2
