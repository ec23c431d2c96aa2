"""Small models whose step is one function, for what a single line of a model changes.

    def step(ops, p, h, x):    # operations, parameters, old states, input
        new = {"h": 0.8 * h["h"] + ops.matmul(x, p["w"])}
        return new, new["h"]   # and the output

Parameters and states are those that the step names in `WEIGHTS` and `STATES`, unless it says other
shapes.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from learners import XS, quietly_compiled, squared_error
from paths import Request, by_chunks
from random_models import INPUTS, OUTPUTS, UNITS, Marked, Module, Unmarked

WEIGHTS = {
    "w": (INPUTS, UNITS),
    "v": (INPUTS, UNITS),
    "r": (UNITS, UNITS),
    "s": (UNITS, UNITS),
    "b": (UNITS,),
    "d": (UNITS,),
    "out": (UNITS, OUTPUTS),
}
STATES = {"h": (UNITS,), "k": (UNITS,), "o": (OUTPUTS,)}


@dataclasses.dataclass(frozen=True, eq=False)
class Toy:
    """A model of a step, for `random_models.Module` and for the oracle.

    weights, states: shapes by name; names alone stand for those of `WEIGHTS` and `STATES`.
    """

    step: Callable
    weights: Mapping[str, tuple[int, ...]] | str = "w out"
    states: Mapping[str, tuple[int, ...]] | str = "h"

    def params(self, dtype=np.float64):
        rng = np.random.default_rng(3)
        shapes = shapes_of(self.weights, WEIGHTS)
        drawn = {k: rng.normal(size=s) / np.sqrt(max(1, *s[:1], 1)) for k, s in shapes.items()}
        return {k: jnp.asarray(v, dtype) for k, v in drawn.items()}

    def start(self, *batch, dtype=np.float64):
        def first(shape):
            value = np.linspace(-0.3, 0.5, int(np.prod(shape))).reshape(shape)
            return jnp.asarray(np.broadcast_to(value, (*batch, *shape)), dtype)

        return {name: first(shape) for name, shape in shapes_of(self.states, STATES).items()}


def shapes_of(given, known):
    return {name: known[name] for name in given.split()} if isinstance(given, str) else given


@jax.custom_vjp
def clipped(value):
    """The value, whose gradient is cut."""
    return value


clipped.defvjp(lambda value: (value, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


def compiled(toy, rule="d_rtrl", marked=True, xs=XS, **options):
    """A learner; what it leaves out is no warning."""
    model = Module(toy, Marked() if marked else Unmarked(), np.float64)
    return quietly_compiled(model, rule, xs[0], batch_size=xs.shape[1], **options)


def request_of(xs=XS, **asked):
    steps, batch = xs.shape[:2]
    defaults = {"mask": np.ones(steps), "reset": np.zeros((steps, batch), bool), "chunk_size": 4}
    return Request(xs, np.full((steps, batch, 1), 0.3), **{**defaults, **asked})


def gradient(learner, path=by_chunks, xs=XS, **asked):
    return path(learner, request_of(xs, **asked), squared_error)


def bptt(toy, xs=XS, **asked):
    """The gradient of backpropagation through time, in plain JAX."""

    def loss(t, y):
        return squared_error(y, 0.3)

    return oracle.gradient_by_rule(toy, "bptt", toy.params(), xs, loss, **asked)


def assert_exact(toy, tolerance=1e-10, **options):
    """Nothing is warned of, and the gradient is that of backpropagation through time."""
    learner = compiled(toy, **options)
    assert not warned(learner), learner.graph.diagnostics
    oracle.assert_close(gradient(learner), bptt(toy), tolerance)


def deviation(found, expected, name):
    """Of one parameter, relative to its largest entry."""
    return np.abs(found[name] - expected[name]).max() / np.abs(expected[name]).max()


def warned(learner):
    return [d for d in learner.graph.diagnostics if d.level == "warning"]


def findings(learner):
    return {(d.level, d.kind, d.paths) for d in learner.graph.diagnostics}


def line_of(function, fragment):
    """`file:line` of the first line in the body of a function that has this in it."""
    lines, first = inspect.getsourcelines(function)
    body = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def ")) + 1
    number = next(first + i for i, line in enumerate(lines) if i >= body and fragment in line)
    return f"{inspect.getsourcefile(function).rpartition('/')[2]}:{number}:"
