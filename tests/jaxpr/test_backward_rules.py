"""Backward passes of the user's own: proportional to the gradient, or reported, or exact.

A trace takes a rule's answer to a gradient of one. That is right for rules that are linear in the
gradient, wherever they stand; of the others the user hears. A state that no later step reads has
no need of a trace, and gets the gradient of backpropagation from any rule.
"""

import functools
import itertools

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close
from backpropagation import of_squares
from drivers import quietly_compiled
from jax.ad_checkpoint import checkpoint_name

import braintrace
from braintrace._jaxpr.dataflow import Kind, kinds_of

BATCH, INPUTS, H = 2, 3, 4
XS = np.random.default_rng(0).normal(size=(5, BATCH, INPUTS))

pytestmark = pytest.mark.usefixtures("float64")

LINEAR = {
    "scaled": lambda a, g: g / (1 + jnp.abs(a)) ** 2,
    "masked": lambda a, g: jnp.where(jnp.abs(a) < 0.5, g, 0.0),
    "zeros added": lambda a, g: jnp.zeros_like(a) + g * a + 0.0,
    "without NaN": lambda a, g: jnp.nan_to_num(g * a),
    "where finite": lambda a, g: jnp.where(jnp.isfinite(g), g, 0),
}
BENT = {
    "clipped": lambda a, g: jnp.clip(g, -0.1, 0.1),
    "added": lambda a, g: g + 0.3 * jnp.sign(a),
    "arctan": lambda a, g: jnp.arctan(g),
    "integers": lambda a, g: (8 * g).astype(int) / 8,
}
PLACES = {
    "direct": lambda f, a: f(a),
    "scan": lambda f, a: jax.lax.scan(lambda c, _: (f(c), None), a, None, length=2)[0],
    "fori_loop": lambda f, a: jax.lax.fori_loop(0, 2, lambda _, c: f(c), a),
    "cond": lambda f, a: jax.lax.cond(jnp.isfinite(a).all(), f, lambda c: 0.5 * f(c), a),
    "for_loop": lambda f, a: brainstate.transform.for_loop(
        lambda s: s * f(a), np.arange(1.0, 3.0)
    ).sum(0),
    "jit": lambda f, a: jax.jit(jax.checkpoint(f))(a),
}


def with_backward(rule):
    @jax.custom_vjp
    def function(a):
        return jnp.tanh(a)

    function.defvjp(lambda a: (jnp.tanh(a), a), lambda a, g: (rule(a, g),))
    return function


CLIPPED = with_backward(BENT["clipped"])


# --- what is linear -----------------------------------------------------------------------

OTHER_RULES = {
    "a scan": lambda a, g: jax.lax.scan(lambda c, x: (0.9 * c + x, c), 0.0, a * g)[1],
    "a scan from one": lambda a, g: jax.lax.scan(lambda c, x: (0.9 * c + x, c), 1.0, a * g)[1],
    "a bent scan": lambda a, g: jax.lax.scan(lambda c, x: (jnp.sin(c) + x, c), 0.0, g)[1],
    "a while": lambda a, g: jax.lax.fori_loop(0, (a > 0).sum(), lambda _, c: a * c, g),
    "a while on g": lambda a, g: jax.lax.fori_loop(0, (g > 0).sum(), lambda _, c: a * c, g),
    "a branch": lambda a, g: jax.lax.cond(a.sum() > 0, lambda: g, lambda: a * g),
    "a branch on g": lambda a, g: jax.lax.cond(g.sum() > 0, lambda: g, lambda: a * g),
    "a branch without g": lambda a, g: jax.lax.cond(a.sum() < 0, lambda: g, lambda: a),
    "all finite": lambda a, g: jax.lax.cond(jnp.isfinite(g).all(), lambda: g, lambda: a),
    "no infinity": lambda a, g: jnp.where(jnp.isnan(g) | jnp.isinf(g), 0, g),
    "norm": lambda a, g: g / jnp.linalg.norm(g),
    "product": lambda a, g: g * g.sum(),
    "constant": lambda a, g: a,
    "zero": lambda a, g: jnp.zeros_like(g),
    "relu": lambda a, g: jax.nn.relu(g),
    "rounded": lambda a, g: jnp.round(g),
    "sorted": lambda a, g: jnp.sort(g),
    "filled up": lambda a, g: g.at[jnp.arange(1, 4)].get(mode="fill", fill_value=1.0),
    "filled up with zeros": lambda a, g: g.at[jnp.arange(1, 4)].get(mode="fill", fill_value=0.0),
    "taken": lambda a, g: g[jnp.argsort(a)][::-1],
    "side by side": lambda a, g: jnp.concatenate([g[:1], a[:2]]),
    "padded": lambda a, g: jnp.pad(g[:2], (1, 0)),
    "padded with ones": lambda a, g: jnp.pad(g[:2], (1, 0), constant_values=1),
    "written over": lambda a, g: g.at[0].set(0.0),
    "written into": lambda a, g: a.at[0].add(g[0]),
    "fft": lambda a, g: jnp.fft.irfft(2 * jnp.fft.rfft(g), 3),
    "solved": lambda a, g: jnp.linalg.solve(jnp.eye(3) + jnp.outer(a, a), g),
    "complex": lambda a, g: jnp.real(jax.lax.complex(g, a) * 1j),
    "centred": lambda a, g: g - g.mean(),
    "small left out": lambda a, g: jnp.where(jnp.abs(g) < 0.4, 0, g),
    "named": lambda a, g: a * checkpoint_name(g, "cotangent"),
    "called back": lambda a, g: jax.pure_callback(np.negative, g, g),
}


RULES = {**LINEAR, **BENT, **OTHER_RULES}
A, G, OTHER = np.asarray([[0.3, -0.7, 1.2], [0.5, -0.07, 2.0], [-1.0, -3.0, -4.0]])


@functools.cache
def answers():
    """What every rule gives for a sum of gradients, and the sum of what it gives."""

    @jax.jit
    def of_all(a, g, other):
        return {
            name: (rule(a, 2 * g + other), 2 * rule(a, g) + rule(a, other))
            for name, rule in RULES.items()
        }

    return of_all(A, G, OTHER)


@pytest.mark.parametrize("name", RULES)
def test_linear_is_what_is_linear_in_numbers(name):
    (found,) = kinds_of(lambda g, a: RULES[name](a, g), jnp.asarray(G), jnp.asarray(A))
    is_linear = np.allclose(*answers()[name]) and name != "called back"
    assert (found in (Kind.LINEAR, Kind.ZERO)) == is_linear


# --- on the way to a state ------------------------------------------------------------------


class Cell(brainstate.nn.Module):
    """One weight for every combination of names; a test fills in the step."""

    def __init__(self, step, names):
        super().__init__()
        draw = np.random.default_rng(1).normal
        self.step, self.names = step, list(names)
        self.w = {n: brainstate.ParamState(draw(size=(INPUTS, H)) / 2) for n in self.names}
        self.readout = brainstate.ParamState(draw(size=(H, 2)) / 2)

    def init_state(self, batch_size=None, **_):
        shape = (H,) if batch_size is None else (batch_size, H)
        self.h = {n: brainstate.HiddenState(jnp.full(shape, 0.1)) for n in self.names}

    def update(self, x):
        self.step(self, x)
        return sum(h.value for h in self.h.values()) @ self.readout.value


def drive(cell, name, x):
    return braintrace.matmul(x, cell.w[name].value)


def leak(cell, name, x):
    cell.h[name].value = 0.8 * cell.h[name].value + jnp.tanh(drive(cell, name, x))
    return cell.h[name].value


def remembered(rules, pairs):
    """Rules at places, on the state or on the drive."""

    def step(cell, x):
        for i, (rule, place) in enumerate(pairs):
            function, h = with_backward(rules[rule]), cell.h[f"{rule} {place}"]
            changed = functools.partial(PLACES[place], function)
            y = drive(cell, f"{rule} {place}", x)
            h.value = 0.5 * changed(h.value) + y if i % 2 else 0.8 * h.value + changed(y)

    return lambda: Cell(step, [f"{rule} {place}" for rule, place in pairs])


def kinds_by_state(graph):
    found = {}
    for diagnostic in graph.diagnostics:
        if diagnostic.level == "warning":
            found.setdefault(diagnostic.paths[-1], set()).add(diagnostic.kind)
    return found


def compiled(make, algorithm="d_rtrl", **options):
    return quietly_compiled(make(), algorithm, XS[0], batch_size=BATCH, **options)


def gradients(learner, chunk_size=2, reduction="sum"):
    learner.reset_state()
    return learner.etrace_grad(
        XS, step_fn=lambda x: jnp.sum(learner(x) ** 2), reduction=reduction, chunk_size=chunk_size
    )


@functools.cache
def backpropagated(make, reduction="sum"):
    return of_squares(make(), XS, batch_size=BATCH, reduction=reduction)


@pytest.mark.core
def test_every_bent_gradient_is_reported_wherever_the_rule_stands():
    make = remembered(BENT, list(itertools.product(BENT, PLACES)))
    graph = compiled(make).graph
    assert kinds_by_state(graph) == {f"h/{name}": {"nonlinear-gradient"} for name in make().names}


def test_linear_rules_are_not_reported_and_exact():
    make = remembered(LINEAR, list(zip(itertools.cycle(LINEAR), PLACES, strict=False)))
    learner = compiled(make)
    assert kinds_by_state(learner.graph) == {}
    assert_gradients_close(gradients(learner), backpropagated(make), 1e-10)


def test_a_rule_between_parameter_and_weight_is_reported():
    def step(cell, x):
        y = braintrace.matmul(x, CLIPPED(cell.w["a"].value))
        cell.h["a"].value = 0.8 * cell.h["a"].value + y

    (found,) = compiled(lambda: Cell(step, "a")).graph.diagnostics
    assert (found.kind, found.level, found.paths) == ("nonlinear-gradient", "warning", ("w/a",))
    assert "test_backward_rules.py" in found.source


def test_a_rule_whose_other_operand_it_bends_is_not_reported():
    @jax.custom_vjp
    def times(a, fixed):
        return a * fixed

    times.defvjp(lambda *both: (times(*both), both), lambda both, g: (g * both[1], jnp.sin(g)))

    def step(cell, x):
        y = times(drive(cell, "a", x), x[:, :1] + jnp.zeros(H))
        cell.h["a"].value = 0.8 * cell.h["a"].value + y

    assert compiled(lambda: Cell(step, "a")).graph.diagnostics == ()


# --- on the way to a state that nobody reads, or to an output ----------------------------------

UNREAD = [f"{rule} {place}" for rule, place in zip(BENT, PLACES, strict=False)]


def unread(cell, x):
    """Readouts of a leaky layer, behind a rule each, and behind one on their weight."""
    h = leak(cell, "leaky", x)
    for name in UNREAD:
        rule, place = name.split(" ")
        function = with_backward(BENT[rule])
        cell.h[name].value = PLACES[place](function, drive(cell, name, x) + 0.5 * h)
    weight = CLIPPED(cell.w["weight"].value)
    cell.h["weight"].value = jnp.tanh(braintrace.matmul(x, weight))


def nothing_read(cell, x):
    """No state is read by a later step: none has a trace."""
    cell.h["a"].value = CLIPPED(drive(cell, "a", x))


MODELS = {
    "unread": lambda: Cell(unread, [*UNREAD, "leaky", "weight"]),
    "nothing read": lambda: Cell(nothing_read, "a"),
}


@pytest.mark.parametrize(
    ("name", "reduction", "chunk_size"), [("unread", "sum", 2), ("nothing read", "mean", 1)]
)
def test_states_that_nobody_reads_get_the_ordinary_gradient(name, reduction, chunk_size):
    make = MODELS[name]
    learner = braintrace.compile(make(), "d_rtrl", XS[0], batch_size=BATCH, strict=True)
    expected = backpropagated(make, reduction)
    assert_gradients_close(gradients(learner, chunk_size, reduction), expected, 1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_so_they_do_step_by_step(name):
    learner = compiled(MODELS[name])
    weights = learner.algorithm.model.states(brainstate.ParamState)

    @brainstate.transform.jit
    def of_step(x):
        return brainstate.transform.grad(lambda: jnp.sum(learner(x) ** 2), weights)()

    found = jax.tree.map(lambda *leaves: sum(leaves), *map(of_step, XS))
    assert_gradients_close(found, backpropagated(MODELS[name]), 1e-10)


ES_D_RTRL = {"algorithm": "es_d_rtrl", "decay_or_rank": 0.7}


@pytest.mark.parametrize(
    ("name", "options"),
    [("unread", ES_D_RTRL), ("nothing read", ES_D_RTRL), ("unread", {"vmap": True})],
    ids=["ES_D_RTRL", "ES_D_RTRL of nothing", "mapped"],
)
def test_so_they_do_with_other_algorithms_and_a_mapped_batch(name, options):
    found = gradients(compiled(MODELS[name], **options))
    expected = dict(backpropagated(MODELS[name]))
    if "algorithm" in options:  # what ES_D_RTRL approximates
        found, expected = ({**g, ("w", "leaky"): jnp.zeros(1)} for g in (found, expected))
    assert_gradients_close(found, expected, 1e-10)


def test_a_rule_on_a_plain_parameter_bends_the_gradient_of_every_step():
    class Model(Cell):
        def update(self, x):
            return leak(self, "a", x) @ CLIPPED(self.readout.value)

    def make():
        return Model(None, "a")

    assert_gradients_close(gradients(compiled(make), len(XS)), backpropagated(make), 1e-10)
