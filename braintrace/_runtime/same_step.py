"""Fingerprints of compiled steps: the programs of one step serve for another with the same one.

An attribute of a model may change without an effect on its ``update``: a counter, a memo, a setting
of something else. The model is then traced again, and if its fingerprint is the same, its programs
stay.
"""

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._graph import TracedModel
from .._jax import (
    OWN_BACKWARD,
    TRANSPARENT_CALLS,
    ClosedJaxpr,
    Equation,
    bind,
    call_body,
    equations_inside,
    runs_library_code,
    trace_to_jaxpr,
)
from .._jaxpr import Program, fingerprint
from .._typing import Path


def fingerprint_of(traced: TracedModel, outside: Mapping[Path, Any]) -> Callable[[], Hashable]:
    """Return a function that computes the fingerprint of a step.

    The rules of custom derivatives are traced now: they may read attributes of the model, and JAX
    calls them again whenever a derivative is traced.

    Parameters
    ----------
    traced, outside
        The step, and the States outside the model that it uses.
    """
    rules = tuple(map(_rule, _with_own_derivative(traced.program)))

    @functools.cache
    def compute() -> Hashable:
        return _names(traced, outside), fingerprint(traced.program.jaxpr), rules

    return compute


def _names(traced: TracedModel, outside: Mapping[Path, Any]) -> Hashable:
    """Return what the inputs and outputs of a step are."""
    leaves = tuple((x.name, x.kind, x.shape, x.dtype) for x in traced.leaves)
    own = tuple((path, id(state)) for path, state in outside.items())
    trees = traced.argument_tree, traced.output_tree, tuple(traced.state_trees.items())
    # Callbacks are functions of the user, which cannot be compared.
    callbacks = None if traced.callbacks is None else object()
    marks = traced.has_found_marks, traced.unmarked
    names = traced.argument_names, traced.written_paths, traced.batch_size
    return leaves, own, trees, callbacks, marks, names


def _with_own_derivative(program: Program) -> Iterator[Equation]:
    """Yield the equations whose derivative is a function of the user."""
    for equation in program.equations:
        for each in (equation, *equations_inside(equation)):
            is_custom = call_body(each) and each.primitive.name not in TRANSPARENT_CALLS
            if is_custom and not runs_library_code(each):
                yield each


def _rule(equation: Equation) -> Hashable:
    try:
        return fingerprint(_differentiated(equation))
    except Exception:  # a rule may refuse numbers that it is not meant for
        return object()


def _differentiated(equation: Equation) -> ClosedJaxpr:
    """Return the derivative of an equation, for tangents or cotangents of one."""

    def run(*operands: Any) -> Any:
        def bound(*values: Any) -> list[Any]:
            return bind(equation, values)

        if equation.primitive.name not in OWN_BACKWARD:
            return jax.jvp(bound, operands, tuple(map(_one, operands)))  # half the time of `vjp`
        results, pull = jax.vjp(bound, *operands)
        return results, pull(list(map(_one, results)))

    return trace_to_jaxpr(run, [atom.aval for atom in equation.invars])


def _one(value: Any) -> Any:
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return jnp.ones_like(value)
    return np.zeros(value.shape, jax.dtypes.float0)
