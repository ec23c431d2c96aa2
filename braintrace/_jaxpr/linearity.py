"""Linearity of functions, by trial: at zero, and at sums of random arguments of two scales."""

import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import OWN_BACKWARD, Equation, equations_inside, struct_of
from .evaluate import evaluate_all
from .vjp import vjp_of

SCALES = (1.0, 1e3)


class Kind(enum.Enum):
    """The dependence of a result on an argument."""

    FREE = "the same for all arguments"
    LINEAR = "proportional to the argument"
    OTHER = "anything else"


def kinds_of(function: Callable[..., Any], argument: Any, *others: Any) -> list[Kind]:
    """Return how the leaves of a function's result depend on its first argument.

    Parameters
    ----------
    function
        The function.
    argument, others
        Shapes and dtypes of its arguments, which are drawn at random.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace._jaxpr import kinds_of
    >>> x = jnp.zeros(3)
    >>> [kind.name for kind in kinds_of(lambda x, y: (x * y, y, x + y), x, x)]
    ['LINEAR', 'FREE', 'OTHER']
    """
    generator = np.random.default_rng(0)

    def draw(like: Any, scale: float = 1.0) -> jax.Array:
        is_number = jnp.issubdtype(like.dtype, jnp.inexact)
        drawn = scale * generator.normal(size=like.shape) if is_number else np.zeros(like.shape)
        return jnp.asarray(drawn, like.dtype)

    with jax.ensure_compile_time_eval():
        fixed = jax.tree.map(draw, others)
        run = jax.jit(lambda argument: jax.tree.leaves(function(argument, *fixed)))
        trials = []
        for scale in SCALES:
            of_scale = functools.partial(draw, scale=scale)
            one, two = (jax.tree.map(of_scale, argument) for _ in range(2))
            arguments = (
                jax.tree.map(lambda a: 0 * a, one),
                one,
                jax.tree.map(lambda a: -a, one),
                two,
                jax.tree.map(lambda a, b: a + 2 * b, one, two),
            )
            trials.append([*_columns([run(a) for a in arguments])])
        return [_kind([trial[leaf] for trial in trials]) for leaf in range(len(trials[0]))]


def _columns(rows: list[list[Any]]) -> Iterator[list[np.ndarray]]:
    return ([np.asarray(value) for value in column] for column in zip(*rows, strict=True))


def _kind(trials: list[list[np.ndarray]]) -> Kind:
    is_linear = all(
        not np.any(zero) and _are_near(total, one + 2 * two) and _are_near(-minus, one)
        for zero, one, minus, two, total in trials
    )
    first = trials[0][0]
    is_free = all(np.array_equal(value, first) for values in trials for value in values)
    return Kind.LINEAR if is_linear else Kind.FREE if is_free else Kind.OTHER


def _are_near(first: np.ndarray, second: np.ndarray) -> bool:
    size = np.max(np.abs(second), initial=1e-30)
    return not np.any(np.abs(first - second) > 1e-3 * size)


@functools.lru_cache(maxsize=1024)
def nonlinear_operands(equation: Equation) -> frozenset[int]:
    """Return the operands whose cotangent is not linear in those of the outputs.

    A true derivative is always linear. The backward rule of a ``custom_vjp`` may be nonlinear: it
    may clip the cotangent, or add something to it.
    """
    every = (equation, *equations_inside(equation))
    if not any(inner.primitive.name in OWN_BACKWARD for inner in every):
        return frozenset()
    vjp = vjp_of(equation)
    if vjp.jaxpr is None:
        return frozenset()

    def pull(cotangents: list[Any], *operands: Any) -> list[Any]:
        return evaluate_all(vjp.jaxpr, [*operands, *cotangents], {})

    operands = [struct_of(atom.aval) for atom in equation.invars]
    cotangents = [struct_of(equation.outvars[k].aval) for k in vjp.outputs]
    pairs = zip(vjp.inputs, kinds_of(pull, cotangents, *operands), strict=True)
    return frozenset(i for i, kind in pairs if kind is not Kind.LINEAR)
