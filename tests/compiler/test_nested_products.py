"""The compiler says what two ETP operations on one recurrent path leave out."""

import functools

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_differ
from every_path import Paths

import braintrace

BATCH, INPUTS, UNITS, STEPS = 3, 2, 4, 8
pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning"),
]


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


class Network(brainstate.nn.Module):
    """A network whose step is given as a function."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.w = brainstate.ParamState(draw(1, INPUTS, UNITS))
        self.a = brainstate.ParamState(draw(2, UNITS, UNITS) / 2)
        self.b = brainstate.ParamState(draw(3, UNITS, UNITS) / 2)

    def init_state(self, batch_size=None, **_):
        lead = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*lead, UNITS)))

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value)
        self.h.value = 0.5 * self.h.value + self.step(self, self.h.value, drive)
        return jnp.tanh(self.h.value)


def nested(self, h, drive):
    inner = jnp.tanh(braintrace.matmul(h, self.a.value))
    return jnp.tanh(braintrace.matmul(inner, self.b.value) + drive)


def nested_and_mixed(self, h, drive):
    inner = jnp.tanh(braintrace.matmul(h, self.a.value))
    return jnp.tanh(jnp.cumsum(braintrace.matmul(inner, self.b.value), -1) + drive)


def findings(step, rule="d_rtrl", **options):
    paths = Paths(functools.partial(Network, step), draw(7, STEPS, BATCH, INPUTS), rule, **options)
    return paths, {(d.kind, d.level, d.paths) for d in paths.learner.graph.diagnostics}


@pytest.mark.parametrize("rule", ["d_rtrl", "snap", "es_d_rtrl"])
def test_a_recurrent_path_through_two_operations_is_reported(rule):
    options = {"decay_or_rank": 0.7} if rule == "es_d_rtrl" else {}
    found = findings(nested, rule, **options)[1]
    assert found == {("truncated", "info", ("h", "h")), ("no-trace", "warning", ("a", "h"))}


def test_what_is_reported_is_left_out():
    paths, _ = findings(nested)
    gradient, exact = paths.sequence(), paths.bptt()
    assert_gradients_differ({"a": gradient["a"]}, {"a": exact["a"]}, 0.1)


def test_a_weight_before_a_coupling_is_not_called_a_readout():
    found = findings(nested_and_mixed)[1]
    warned = {path for _, level, paths in found if level == "warning" for path in paths}
    assert {"a", "b"} <= warned
    assert not any(kind == "no-trace" and level == "info" for kind, level, _ in found)


@pytest.mark.parametrize("rule", ["rtrl", "uoro"])
def test_rules_that_follow_every_path_report_none(rule):
    assert findings(nested, rule)[1] == set()


def test_a_readout_reaches_no_hidden_state():
    class WithReadout(Network):
        def update(self, x):
            hidden = super().update(x)
            return braintrace.matmul(braintrace.matmul(hidden, self.a.value), self.b.value)

    model = WithReadout(lambda self, h, drive: drive)
    model.init_state(BATCH)
    graph = braintrace.compile_etrace_graph(model, draw(7, BATCH, INPUTS))
    assert [(d.kind, d.level, d.paths) for d in graph.diagnostics] == [
        ("no-trace", "info", ("a",)),
        ("no-trace", "info", ("b",)),
    ]
