"""Gradients are the ones that the library gave when it was tested in full, to the tenth digit.

The files have the numbers of a model, its data, and rows of gradients by rule and path, flat and in
the order of the names. They are never written again.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from catalogue_models import spike
from random_models import Marked, Module, named
from toys import Toy

import braintrace

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning"),
]
FOLDER = pathlib.Path(__file__).parent / "support" / "golden"
RULES = {"d_rtrl": {}, "es_d_rtrl": {"decay_or_rank": 0.7}, "rtrl": {}}


def independent(ops, p, h, x):
    y = ops.matmul(x, p["w_in"], p["b"]) + ops.element_wise(p["u"], lambda u: u) * h["h"]
    return {"h": jnp.tanh(y)}, jnp.tanh(y) @ p["w_out"]


def gated(ops, p, s, x):
    h = s["h"]
    r, z = jnp.split(jax.nn.sigmoid(ops.matmul(jnp.concatenate([x, h], -1), p["w_rz"])), 2, -1)
    n = jnp.tanh(ops.matmul(x, p["w_in"], p["b"]) + r * ops.matmul(h, p["w_rec"]))
    h = (1 - z) * h + z * n
    return {"h": h}, h @ p["w_out"]


def adapting(ops, p, s, x):
    z = spike(s["V"] - 1 - 0.5 * s["a"])
    y = ops.matmul(x, p["w_in"]) + ops.matmul(z, p["w_rec"])
    new = {"V": 0.9 * s["V"] - z + y, "a": 0.95 * s["a"] + z}
    new["o"] = 0.8 * s["o"] + spike(new["V"] - 1 - 0.5 * new["a"]) @ p["w_out"]
    return new, new["o"]


STEPS = {"indrnn": independent, "gru": gated, "alif": adapting}


class Stored(Toy):
    """A step with the numbers of a file."""

    def params(self, dtype=np.float64):
        return {k[2:]: jnp.asarray(v) for k, v in self.weights.items() if k.startswith("p/")}

    def start(self, *batch, dtype=np.float64):
        states = {k[2:]: v for k, v in self.weights.items() if k.startswith("s/")}
        return {k: jnp.asarray(np.broadcast_to(v, (*batch, *v.shape))) for k, v in states.items()}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_the_stored_ones(name, rule):
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        stored = dict(file)
    module = Module(Stored(STEPS[name], stored), Marked(), np.float64)
    xs, targets = stored["xs"], stored["targets"]
    options = {**RULES[rule], "batch_size": xs.shape[1]}
    learner = braintrace.compile(module, rule, xs[0], **options)
    rows = json.loads(str(stored["rows"]))[rule]
    for path, asked in {
        "chunks of 3": {"chunk_size": 3},
        "mask and reset": {k: stored[k] for k in ("mask", "reset")},
    }.items():
        learner.reset_state()
        gradients = learner.etrace_grad(
            *(xs, targets),
            step_fn=lambda x, y: 0.5 * jnp.sum((learner(x) - y) ** 2),
            reduction="sum",
            **asked,
        )
        found = np.concatenate([np.ravel(g) for _, g in sorted(named(gradients).items())])
        expected = stored["values"][rows[path]]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10 * np.abs(expected).max())
