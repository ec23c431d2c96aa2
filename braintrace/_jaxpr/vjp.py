"""Backward dataflow through an equation: forward through its vjp.

JAX derives the vector-Jacobian product of the equation as a program that computes the cotangents of
operands from the cotangents of results. No second table for the backward direction is needed. The
most frequent equations need no program: the cotangent of an elementwise equation is elementwise.
"""

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import (
    OWN_BACKWARD,
    AnyJaxpr,
    Atom,
    Equation,
    bind,
    equations_inside,
    struct_of,
    trace_to_jaxpr,
)
from .dataflow import Question, flows_of_outputs
from .evaluate import Constants, evaluate_all
from .lattices import Flow, Lattice
from .primitives import CONSTANT, ELEMENTWISE
from .program import carries_derivative, program_of


@dataclasses.dataclass(frozen=True, eq=False)
class Vjp:
    """The vector-Jacobian product of an equation.

    Attributes
    ----------
    jaxpr
        Maps ``(*operands, *cotangents of some results)`` to cotangents of some operands; ``None``
        without a derivative rule.
    operands
        Number of operands.
    inputs, outputs
        The operands and results that have derivatives.
    """

    jaxpr: AnyJaxpr | None
    operands: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def flows(
        self,
        lattice: Lattice,
        constants: Constants | None,
        atoms: Sequence[Atom],
        cotangents: Sequence[Flow],
    ) -> list[Flow] | None:
        """Return the flows of the operands' cotangents, given the results' cotangents.

        Parameters
        ----------
        lattice
            The lattice.
        constants
            Constants of the program that contains the equation; ``None``: unknown.
        atoms
            The operands, as atoms of that program.
        cotangents
            One flow for each result.

        Returns
        -------
        list or None
            One flow for each operand; ``None`` without a derivative rule.
        """
        flows: list[Flow] = [None] * self.operands
        inputs = [*flows, *(cotangents[k] for k in self.outputs)]
        if not self.inputs or all(flow is None for flow in inputs):
            return flows
        if self.jaxpr is None:
            return None
        if constants is None:
            inside = Constants(program_of(self.jaxpr))
        else:
            inside = constants.body(self.jaxpr, atoms)
        results = flows_of_outputs(Question(lattice), inside, inputs)
        for operand, flow in zip(self.inputs, results, strict=True):
            flows[operand] = flow
        return flows


def vjp_of(equation: Equation) -> Vjp:
    """Return the vjp of an equation; equal equations share one."""
    params = tuple(equation.params.items())
    operands = tuple((atom.aval, carries_derivative(atom)) for atom in equation.invars)
    results = tuple(var.aval for var in equation.outvars)
    key = _Alike(equation.primitive, params, operands, results, equation)
    try:
        hash(key)
    except TypeError:  # parameters of a foreign operation that cannot be compared
        return _vjp_of_alike.__wrapped__(key)
    return _vjp_of_alike(key)


@dataclasses.dataclass(frozen=True)
class _Alike:
    """Cache key of a vjp: equal for equations with the same vjp."""

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    operands: tuple[tuple[Any, bool], ...]
    results: tuple[Any, ...]
    equation: Equation = dataclasses.field(compare=False)


@functools.lru_cache(maxsize=256)
def _vjp_of_alike(key: _Alike) -> Vjp:
    equation, count = key.equation, len(key.equation.invars)
    inputs = tuple(i for i, atom in enumerate(equation.invars) if carries_derivative(atom))
    outputs = tuple(k for k, atom in enumerate(equation.outvars) if carries_derivative(atom))

    def pulled(*values: Any) -> list[jax.Array]:
        def function(*changed: Any) -> list[jax.Array]:
            every = list(values[:count])
            for index, value in zip(inputs, changed, strict=True):
                every[index] = value
            results = bind(equation, every)
            return [results[k] for k in outputs]

        _, pull = jax.vjp(function, *(values[i] for i in inputs))
        return list(pull(list(values[count:])))

    avals = [atom.aval for atom in (*equation.invars, *(equation.outvars[k] for k in outputs))]
    jaxpr = None
    if inputs and outputs:
        # Without a derivative rule, the path is reported, not guessed.
        with contextlib.suppress(NotImplementedError, TypeError, ValueError):
            jaxpr = trace_to_jaxpr(pulled, avals)
    return Vjp(jaxpr, count, inputs, outputs)


def flows_back(
    lattice: Lattice, constants: Constants, equation: Equation, cotangents: Sequence[Flow]
) -> list[Flow] | None:
    """Return the flows of the cotangents of an equation's operands.

    Parameters
    ----------
    lattice
        The lattice.
    constants
        Constants of the program that contains the equation.
    equation
        The equation.
    cotangents
        The flow of the cotangent of each result.

    Returns
    -------
    list or None
        One flow for each operand; ``None`` without a derivative rule.
    """
    name = equation.primitive.name
    if name in CONSTANT:
        return [None] * len(equation.invars)
    if name == "optimization_barrier":  # operand by operand
        return list(cotangents)
    if name not in ELEMENTWISE:
        return vjp_of(equation).flows(lattice, constants, equation.invars, cotangents)
    (flow,) = cotangents
    assert flow is not None
    return [
        _narrowed(lattice, flow, atom.aval.shape) if carries_derivative(atom) else None
        for atom in equation.invars
    ]


def _narrowed(lattice: Lattice, flow: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Return the cotangent flow of an operand that the equation itself broadcasts."""
    whole = flow.shape[: flow.ndim - lattice.rank]
    if whole == tuple(shape):
        return flow
    added = len(whole) - len(shape)
    axes = [*range(added), *(added + i for i, n in enumerate(shape) if n < whole[added + i])]
    return lattice.over(flow, axes).reshape((*shape, *flow.shape[len(whole) :]))


# --- linearity of functions, by trial: at zero, and at sums of random arguments of two scales

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
