"""A compartmental model of braincell learns, initialised once, by RTRL and by D_RTRL."""

import importlib.util

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from repository import DOCS

import braintrace


@pytest.mark.parametrize("rule", ["rtrl", "d_rtrl"])
def test_a_cell_of_braincell_has_the_gradient_of_backpropagation(rule):
    """The soma and the dendrite of the example, whose solver couples their potentials.

    For D_RTRL, they are one unit with the potentials at the ends of branches.
    """
    pytest.importorskip("braincell", minversion="0.2")
    path = DOCS / "examples" / "conductance_fit.py"
    spec = importlib.util.spec_from_file_location("conductance_fit", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model, steps = example.Fit(pull=0.1), 50
    times, recorded = np.arange(steps) * example.DT * u.ms, np.full((steps, 1, 2), -60.0, "float32")
    weights = model.states(brainstate.ParamState)

    def total():
        model.cell.reset_state()
        return jnp.mean((brainstate.transform.for_loop(model, times, recorded) - recorded) ** 2)

    expected = brainstate.transform.jit(brainstate.transform.grad(total, weights))()
    learner = braintrace.compile(model, rule, times[0], recorded[0], strict=True)
    for _ in range(2):  # from the same start
        found = learner.etrace_grad(
            times, recorded, step_fn=lambda t, v: jnp.mean((learner(t, v) - v) ** 2)
        )
        learner.reset_state()
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, atol=1e-5 * np.abs(value).max())
