"""Operation counts of a program."""

import itertools
import math

import jax
import jax.numpy as jnp

from .._etrace_op import ETPPrimitive, get_primitive_spec, init_trace
from .._jax import AnyJaxpr, Equation, open_jaxpr, sub_jaxprs
from .._jaxpr.dataflow import IN_ORDER, PRODUCTS, moved_operands

MOVES = IN_ORDER | {"iota", "optimization_barrier"}
"""Primitives without arithmetic, besides the moves of elements."""


def arithmetic(jaxpr: AnyJaxpr) -> int:
    """Return the number of arithmetic operations of a program.

    An elementwise function counts as one operation per element, and the body of a loop of unknown
    length counts once.
    """
    return sum(map(_of_equation, open_jaxpr(jaxpr)[0].eqns))


def _of_equation(equation: Equation) -> int:
    if equation.primitive.name in PRODUCTS or isinstance(equation.primitive, ETPPrimitive):
        return flops_of(equation)
    bodies = [arithmetic(body) for body in sub_jaxprs(equation)]
    if equation.primitive.name == "scan":
        times: int = equation.params["length"]
        return times * sum(bodies)
    if equation.primitive.name == "cond":
        return max(bodies)
    if bodies:
        return bodies[-1]
    if equation.primitive.name in MOVES or moved_operands(equation):
        return 0
    is_sum = equation.primitive.name.startswith(("reduce_", "cum", "arg"))
    counted = equation.invars[:1] if is_sum else equation.outvars
    return sum(
        int(atom.aval.size) for atom in counted if jnp.issubdtype(atom.aval.dtype, jnp.inexact)
    )


def flops_of(equation: Equation) -> int:
    """Return the multiplications and additions in the products of an equation.

    Products in a loop of unknown length count once.
    """
    name, params = equation.primitive.name, equation.params
    operands: list[tuple[int, ...]] = [atom.aval.shape for atom in equation.invars]
    results: list[tuple[int, ...]] = [var.aval.shape for var in equation.outvars]
    if isinstance(equation.primitive, ETPPrimitive):
        return _flops_of_marked(equation, equation.primitive)
    if name == "dot_general":
        (summed, _), _ = equation.params["dimension_numbers"]
        length: int = math.prod(operands[0][axis] for axis in summed)
        return 2 * math.prod(results[0]) * length
    if name == "conv_general_dilated":
        features = params["dimension_numbers"].rhs_spec[0]
        kernel = [size for axis, size in enumerate(operands[1]) if axis != features]
        return 2 * math.prod(results[0]) * math.prod(kernel)
    times: int = params["length"] if name == "scan" else 1
    bodies = (open_jaxpr(body)[0].eqns for body in sub_jaxprs(equation))
    return times * sum(map(flops_of, itertools.chain(*bodies)))


def _flops_of_marked(equation: Equation, primitive: ETPPrimitive) -> int:
    spec, (y,) = get_primitive_spec(primitive), equation.outvars
    positions = spec.resolve_trainable_invars(equation.params)
    weights = {name: equation.invars[position] for name, position in positions.items()}
    x = None if spec.x_invar_index is None else equation.invars[spec.x_invar_index]
    if x is not None and not jnp.issubdtype(x.aval.dtype, jnp.inexact):
        return 0  # a gather multiplies nothing
    # Each row of the output uses every weight, or the weights in its trace.
    rows = math.prod(y.aval.shape[:-1])
    trace = jax.eval_shape(lambda: init_trace(primitive, equation.params, x, y, weights))
    entries: int = max(math.prod(shape.shape) for shape in trace.values())
    met: int = rows * max(math.prod(weight.aval.shape) for weight in weights.values())
    return 2 * min(met, entries)
