"""A change of the model after which traces would stand for something else is refused."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrices import csr

import braintrace

BATCH = 2
XS = np.random.default_rng(0).normal(size=(4, BATCH, 3)).astype(np.float32)
WEIGHT = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
BACKWARD = np.arange(4)[::-1]
STRIPES = [csr(np.roll(np.eye(3, 4, dtype=np.float32), n, axis=1)) for n in range(2)]


class Model(brainstate.nn.Module):
    """A leaky state; ``drive(model, x)`` reads what changes in ``now``."""

    def __init__(self, drive, before):
        super().__init__()
        self.drive, self.now = drive, before
        self.w = brainstate.ParamState(jnp.asarray(WEIGHT))
        self.v = brainstate.ParamState(jnp.asarray(-WEIGHT))
        self.entries = brainstate.ParamState(jnp.ones(3))

    def init_state(self, batch_size=None):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        self.h.value = 0.7 * self.h.value + self.drive(self, x)
        return self.h.value


def masked(model, x):
    return braintrace.matmul(x, model.now * model.w.value)


def picked(model, x):
    return braintrace.matmul(x, model.w.value)[:, model.now]


def sparse(model, x):
    return braintrace.sparse_matmul(x, model.entries.value, sparse_mat=model.now)


def of_entries(model, x):
    return x[:, :1] + braintrace.element_wise(model.w.value[0], model.now)


def in_turn(model, x):
    found = {name: braintrace.matmul(x, getattr(model, name).value) for name in model.now}
    return found["w"] * jnp.tanh(found["v"])


def twice(model, x):
    inputs = {"plain": x, "squared": x**2}
    found = {name: braintrace.matmul(inputs[name], model.w.value) for name in model.now}
    return found["plain"] * jnp.tanh(found["squared"])


def straight_through(model, x):
    keep = jax.custom_jvp(lambda w: 1.0 * w)
    keep.defjvp(lambda primals, tangents: (keep(*primals), model.now * tangents[0]))
    return braintrace.matmul(x, keep(model.w.value))


def masked_in_a_loop(model, x):
    rows = jax.lax.map(jax.jit(lambda row: model.now * row), model.w.value)
    return braintrace.matmul(x, rows)


KEY = jax.random.key(0)


def gained(model, x):
    x = x + 0.1 * jax.random.normal(KEY, x.shape)  # a constant whose contents cannot be read
    return model.now * braintrace.matmul(jnp.tanh(model.now * x), model.w.value)


CHANGES = {
    "function of a weight": (masked, np.float32(1), np.float32(0.5)),
    "derivative of a function of a weight": (straight_through, np.float32(1), np.float32(0.5)),
    "function of a weight in a loop": (masked_in_a_loop, np.ones(4), np.arange(4.0)),
    "units that a product reaches": (picked, np.arange(4), BACKWARD),
    "pattern of a matrix": (sparse, *STRIPES),
    "function of an operation": (of_entries, jnp.tanh, jnp.sin),
    "order of two weights": (in_turn, ("w", "v"), ("v", "w")),
    "order of uses of a weight": (twice, ("plain", "squared"), ("squared", "plain")),
}
ROWS = [
    ("function of a weight", "d_rtrl", {}),
    ("function of a weight", "snap", {"n": 2}),
    ("derivative of a function of a weight", "d_rtrl", {}),
    ("function of a weight in a loop", "d_rtrl", {}),
    ("units that a product reaches", "d_rtrl", {}),
    ("units that a product reaches", "snap", {"n": 2}),
    ("pattern of a matrix", "d_rtrl", {}),
    ("function of an operation", "d_rtrl", {}),
    ("order of two weights", "snap", {"n": 2}),
    ("order of two weights", "kf_rtrl", {}),
    ("order of uses of a weight", "es_d_rtrl", {"decay_or_rank": 0.8}),
]


def compiled(change, rule, **options):
    drive, before, _ = change
    return braintrace.compile(Model(drive, before), rule, XS[0], batch_size=BATCH, **options)


def gradient(learner, xs):
    return learner.etrace_grad(xs, step_fn=lambda x: (learner(x) ** 2).sum())


@pytest.mark.parametrize(("name", "rule", "options"), ROWS)
def test_another_meaning_is_refused(name, rule, options):
    learner = compiled(CHANGES[name], rule, **options)
    gradient(learner, XS[:2])
    learner.algorithm.model.now = CHANGES[name][2]
    with pytest.raises(braintrace.NotCompiledError, match=r"needs other traces.*`now(\[0\])?`"):
        gradient(learner, XS[2:])


def test_a_mask_whose_contents_change_is_refused():
    """The compiled step has a copy of it; only this copy tells what the traces stand for."""
    mask = np.ones(4, np.float32)
    learner = compiled((masked, mask, None), "d_rtrl")
    gradient(learner, XS[:2])
    mask[:] = 0.5
    with pytest.raises(braintrace.NotCompiledError, match=r"needs other traces.*`now`"):
        gradient(learner, XS[2:])


def test_derivatives_by_a_parameter_itself_go_on_with_another_function_of_it():
    """RTRL is backpropagation through time, whatever enters each product."""
    learner = compiled(CHANGES["function of a weight"], "rtrl")
    gradient(learner, XS[:2])
    learner.algorithm.model.now = np.float32(0.5)
    found = gradient(learner, XS[2:])

    def loss(w):
        h, losses = jnp.zeros((BATCH, 4)), []
        for scale, x in zip((1, 1, 0.5, 0.5), XS, strict=True):
            h = 0.7 * h + x @ (scale * w)
            losses.append(jnp.sum(h**2))
        return (losses[2] + losses[3]) / 2

    np.testing.assert_allclose(found["w",], jax.jit(jax.grad(loss))(WEIGHT), rtol=1e-5)


def test_derivatives_by_a_parameter_itself_go_on_in_another_order_of_weights():
    changing, same = (compiled(CHANGES["order of two weights"], "rtrl") for _ in range(2))
    for learner in (changing, same):
        gradient(learner, XS[:2])
    changing.algorithm.model.now = ("v", "w")
    found, expected = (gradient(learner, XS[2:]) for learner in (changing, same))
    for path in expected:
        np.testing.assert_allclose(found[path], expected[path], rtol=1e-5)


@pytest.mark.parametrize("rule", ["d_rtrl", "es_d_rtrl", "snap"])
def test_what_a_step_computes_anew_may_change(rule):
    options = {"decay_or_rank": 0.8} if rule == "es_d_rtrl" else {}
    learner = compiled((gained, np.float32(1), None), rule, **options)
    gradient(learner, XS[:2])
    learner.algorithm.model.now = np.float32(0.5)
    gradient(learner, XS[2:])
