"""The immediate gradient is `jax.grad` of each step, and truncated BPTT that of each window."""

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close, assert_states_close
from drivers import (
    build_learner,
    sequence_gradient,
    snapshot,
)
from no_past import NoPast
from single_steps import BATCH, LENGTH, plain_gradient

import braintrace

NAMES = (
    "LearntLeak",
    "ALIFLateThreshold",
    "LSTMFused",
    "TwoLayers",
    "GRU",
    "LayerNormRNN",
    "PlainInputRNN",
    "LeakyWithBypass",
)
MASK = np.float32([1, 0, 2, 0.5, 1, 0])
ALL_AT_3 = np.arange(LENGTH) == 3
SOME = np.stack([np.arange(LENGTH) == 2, np.arange(LENGTH) % 4 == 1], axis=1)


BY_RECORDS = ("LSTMFused", "TwoLayers", "ALIFLateThreshold")
"""Models of which a rule from outside the package learns all, by the records of a step."""


each_model_and_rule = pytest.mark.parametrize(
    ("case", "rule"),
    [
        pytest.param(catalogue.BY_NAME[name], rule, id=f"{name}-{rule.names[0]}")
        for rule, names in {braintrace.Immediate: NAMES, NoPast: BY_RECORDS}.items()
        for name in names
    ],
)


@pytest.mark.by_day(
    "LearntLeak-immediate-batch axis-2 and 6",
    "ALIFLateThreshold-immediate-mapped-6 alone",
    "TwoLayers-immediate-mapped-1 and 4",
    "PlainInputRNN-immediate-batch axis-1 and 4",
)
@pytest.mark.parametrize(
    "some",
    [(1, 4), (2, LENGTH), (LENGTH,), (1, 2, 4, LENGTH)],
    ids=["1 and 4", "2 and 6", "6 alone", "all"],
)
@pytest.mark.parametrize("style", ["batch axis", "mapped"])
@each_model_and_rule
def test_the_gradient_of_a_sequence(case, rule, style, some):
    learner = build_learner(case, rule.names[0], style, BATCH)
    data = case.sequences(BATCH, LENGTH)
    runs = {1: {}, 4: {"mask": MASK}, LENGTH: {"reset": SOME}}
    if style == "batch axis":
        runs |= {2: {"reset": ALL_AT_3, "mask": MASK}}
    runs = {chunk: runs[chunk] for chunk in some if chunk in runs}
    for chunk_size, options in runs.items():
        learner.reset_state(BATCH)
        found = sequence_gradient(learner, case, *data, chunk_size=chunk_size, **options)
        context = f"{case.name}, chunks of {chunk_size}, {list(options)}"
        assert_gradients_close(found, plain_gradient(case, **options), 1e-5, context)


# --- truncated backpropagation through time ------------------------------------------------------


# --- what it tells and keeps ---------------------------------------------------------------------


def test_it_reports_and_saves_no_trace():
    case = catalogue.BY_NAME["GRU"]
    learner = build_learner(case, "immediate", batch=BATCH, strict=True)
    report = learner.report()
    assert report.stored_bytes == report.possible_bytes == report.carried_bytes == 0
    assert {d.kind for d in report.diagnostics} == {"no-trace", "no-hidden-state"}
    reasons = {row.parameter: row.reason for row in report.without_trace}
    assert reasons["w_z"] == "no-trace"
    assert reasons["w_out"] == "used by ordinary operations only"
    saved = snapshot(learner)
    assert saved[1] == {}
    with pytest.raises(braintrace.OptionError, match="'w_z', which has no trace"):
        learner.eligibility("w_z")
    learner.algorithm.traces.value = {}
    with pytest.raises(braintrace.ShapeError, match="'w' is unexpected"):
        learner.algorithm.traces.value = {"w": jnp.zeros(3)}
    assert_states_close(snapshot(learner), saved)


class Relaxing(brainstate.nn.Module):
    """A loop of unknown length follows the state, and perhaps the weight."""

    def __init__(self, of_weight):
        super().__init__()
        self.w, self.of_weight = brainstate.ParamState(jnp.ones((2, 3))), of_weight

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.ones((batch_size, 3)))

    def update(self, x):
        drive = x @ self.w.value
        start = self.h.value + drive if self.of_weight else self.h.value
        h = jax.lax.while_loop(lambda h: jnp.abs(h).max() > 1, lambda h: h / 2, start)
        self.h.value = h if self.of_weight else h + drive
        return self.h.value


def test_a_loop_of_unknown_length_behind_a_weight_is_refused_by_name():
    x = jnp.ones((1, 2))

    def compiled(of_weight, **options):
        return braintrace.compile(Relaxing(of_weight), "immediate", x, batch_size=1, **options)

    for options in ({"of_weight": True}, {"of_weight": False, "window": 2}):
        with pytest.raises(braintrace.CompilationError, match=r"`Immediate` .*`while`.*update"):
            compiled(**options)
    learner = compiled(of_weight=False)
    found = learner.etrace_grad(x[None], step_fn=lambda x: learner(x).sum(), reduction="sum")
    np.testing.assert_array_equal(found[("w",)], np.ones((2, 3)))
