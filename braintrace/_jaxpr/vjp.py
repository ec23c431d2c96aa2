"""Backward dataflow through an equation, and linearity of backward rules.

The most frequent equations have a rule: moves, sums, products, elementwise functions. For all
others, JAX derives the vector-Jacobian product of the equation as a program, and labels flow
forward through that. No second table of primitives is needed.
"""

import contextlib
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import (
    OWN_BACKWARD,
    AnyJaxpr,
    Equation,
    bind,
    equations_inside,
    struct_of,
    trace_to_jaxpr,
)
from .dataflow import Dataflow, Flow, Lattice, by_letters, filled, spread
from .primitives import (
    ELEMENTWISE,
    WINDOWS,
    Constants,
    elements_of_windows,
    letters_of,
    moved_operands,
    sources_of,
)
from .program import STOPS_GRADIENT, carries_derivative, evaluate_all, program_of


class Vjp(NamedTuple):
    """The vector-Jacobian product of an equation.

    Attributes
    ----------
    jaxpr
        Maps ``(*operands, *cotangents of some results)`` to cotangents of some operands; ``None``
        without a derivative rule.
    inputs, outputs
        The operands and results that have derivatives.
    """

    jaxpr: AnyJaxpr | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def vjp_of(equation: Equation) -> Vjp:
    """Return the vjp of an equation."""
    count = len(equation.invars)
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
    return Vjp(jaxpr, inputs, outputs)


def flows_by_vjp(
    lattice: Lattice,
    equation: Equation,
    cotangents: Sequence[Flow],
    constants: Constants | None = None,
) -> list[Flow] | None:
    """Return the flows of the operands' cotangents, by the program of the vjp.

    Parameters
    ----------
    lattice
        The lattice.
    equation, cotangents
        The equation, and the flow of the cotangent of each result.
    constants
        Constants of the program that contains the equation; ``None``: unknown.

    Returns
    -------
    list or None
        One flow for each operand; ``None`` without a derivative rule.
    """
    vjp, flows = vjp_of(equation), list[Flow]([None] * len(equation.invars))
    inputs = [*flows, *(cotangents[k] for k in vjp.outputs)]
    if not vjp.inputs or all(flow is None for flow in inputs):
        return flows
    if vjp.jaxpr is None:
        return None
    if constants is None:
        inside = Constants(program_of(vjp.jaxpr))
    else:
        inside = constants.body(vjp.jaxpr, equation.invars)
    results = Dataflow(inside, lattice).flows_of_outputs(inputs)
    for operand, flow in zip(vjp.inputs, results, strict=True):
        flows[operand] = flow
    return flows


def flows_back(
    lattice: Lattice, constants: Constants, equation: Equation, cotangents: Sequence[Flow]
) -> list[Flow] | None:
    """Return the same by a rule, if there is one for the primitive."""
    name, atoms = equation.primitive.name, equation.invars
    if name in STOPS_GRADIENT or all(flow is None for flow in cotangents):
        return [None] * len(atoms)
    if name == "optimization_barrier":  # operand by operand
        return list(cotangents)
    result = equation.outvars[0].aval.shape
    flow = filled(lattice, cotangents[0], result)
    flows: Sequence[Flow] | None = None
    if name in ELEMENTWISE:
        if all(a.aval.shape == result or not carries_derivative(a) for a in atoms):
            flows = [flow] * len(atoms)
    elif letters := letters_of(equation):
        *own, after = letters
        pairs = zip(own, atoms, strict=True)
        flows = [by_letters(lattice, flow, after, before, a.aval.shape) for before, a in pairs]
    else:
        flows = _put_back(lattice, constants, equation, cotangents)
    if flows is None:
        return flows_by_vjp(lattice, equation, cotangents, constants)
    pairs = zip(atoms, flows, strict=True)
    return [flow if carries_derivative(atom) else None for atom, flow in pairs]


def _put_back(
    lattice: Lattice, constants: Constants, equation: Equation, cotangents: Sequence[Flow]
) -> list[Flow] | None:
    """Return the cotangents of an equation that moves elements, or reads them in windows."""
    parts, sources = moved_operands(equation), sources_of(constants, equation)
    if equation.primitive.name in WINDOWS:
        parts, sources = (0,), [elements_of_windows(equation)]
    if sources is None:
        return None
    sizes = [equation.invars[part].aval.size for part in parts]
    every = lattice.empty([sum(sizes)])
    for source, flow in zip(sources, cotangents, strict=True):
        if flow is not None:
            every = lattice.put(every, source, spread(lattice, flow, source.shape))
    flows: list[Flow] = [None] * len(equation.invars)
    for part, own in zip(parts, np.split(every, np.cumsum(sizes)[:-1]), strict=True):
        flows[part] = own.reshape((*equation.invars[part].aval.shape, *every.shape[1:]))
    return flows


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
    >>> from braintrace._jaxpr.vjp import kinds_of
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
            a, b = (jax.tree.map(functools.partial(draw, scale=scale), argument) for _ in range(2))
            for p, q in ((0, 0), (1, 0), (-1, 0), (0, 1), (1, 2)):
                total = jax.tree.map(lambda a, b, p=p, q=q: p * a + q * b, a, b)
                trials.append([*map(np.asarray, run(total))])
    return [_kind(*values) for values in zip(*trials, strict=True)]


def _kind(*values: np.ndarray) -> Kind:
    def is_linear(zero: Any, one: Any, minus: Any, two: Any, total: Any) -> bool:
        return not np.any(zero) and _are_near(total, one + 2 * two) and _are_near(-minus, one)

    if is_linear(*values[:5]) and is_linear(*values[5:]):
        return Kind.LINEAR
    is_free = all(np.array_equal(value, values[0]) for value in values)
    return Kind.FREE if is_free else Kind.OTHER


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
