"""Equations with bodies: loops, branches and calls, rebuilt around other bodies.

JAX's public functions rebuild loops, branches, calls and functions with a custom derivative. The
caller provides the function that runs each body.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

import jax
from jax.typing import ArrayLike

from .._jax import AnyJaxpr, Equation, bind, scan_counts, shard_map_axes, sub_jaxprs
from .._typing import PyTree

Value = TypeVar("Value")

RunBody: TypeAlias = Callable[[AnyJaxpr, list[ArrayLike]], Sequence[ArrayLike]]
"""``(body, values of its inputs) -> values of its outputs``."""


@dataclasses.dataclass(frozen=True)
class Loop(Generic[Value]):
    """A ``scan`` or ``while`` loop, with one value for each of its operands.

    Attributes
    ----------
    body
        Maps ``(*fixed, *carried, *a slice of each sequence)`` to
        ``(*carried, *a slice of each result)``.
    condition
        Maps ``(*tested, *carried)`` to whether the loop continues; ``None``: a ``scan``.
    tested, fixed
        Loop-invariant operands of the condition and of the body.
    carried
        The carry before the first step.
    sequences
        Operands that are read slice by slice.
    """

    body: AnyJaxpr
    condition: AnyJaxpr | None
    tested: list[Value]
    fixed: list[Value]
    carried: list[Value]
    sequences: list[Value]


def loop_of(equation: Equation, operands: Sequence[Value]) -> Loop[Value]:
    """Return a ``scan`` or ``while`` loop, its operands sorted by their role."""
    params, values = equation.params, list(operands)
    if equation.primitive.name == "while":
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]
        body, condition = params["body_jaxpr"], params["cond_jaxpr"]
        return Loop(body, condition, values[:first], values[first:last], values[last:], [])
    fixed, carried = scan_counts(equation)
    last = fixed + carried
    return Loop(params["jaxpr"], None, [], values[:fixed], values[fixed:last], values[last:])


def rebuilt(equation: Equation, operands: list[ArrayLike], run: RunBody) -> list[ArrayLike] | None:
    """Rebuild an equation around bodies that a function runs; return its outputs.

    Parameters
    ----------
    equation, operands
        The equation, and the values of its operands.
    run
        Runs a body.

    Returns
    -------
    list or None
        ``None`` for an equation that cannot be rebuilt.
    """
    rebuild = _REBUILD.get(equation.primitive.name)
    return None if rebuild is None else rebuild(equation, operands, run)


def _function(body: AnyJaxpr, run: RunBody) -> Callable[..., list[ArrayLike]]:
    return lambda *values: list(run(body, list(values)))


def _again(function: Callable[..., PyTree], run: RunBody) -> Callable[..., PyTree]:
    """Return a function whose equations are run like the equations of a body."""

    def again(*arguments: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = run(closed, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return again


def _call(equation: Equation, operands: list[ArrayLike], run: RunBody) -> list[ArrayLike]:
    (body,) = sub_jaxprs(equation)
    return list(run(body, operands))


def _checkpoint(equation: Equation, operands: list[ArrayLike], run: RunBody) -> list[ArrayLike]:
    params = equation.params
    body = _function(params["jaxpr"], run)
    options = {"policy": params["policy"], "prevent_cse": params["prevent_cse"]}
    return list(jax.checkpoint(body, **options)(*operands))


def _cond(equation: Equation, operands: list[ArrayLike], run: RunBody) -> list[ArrayLike]:
    branches = [_function(branch, run) for branch in equation.params["branches"]]
    return list(jax.lax.switch(operands[0], branches, *operands[1:]))


def _while(equation: Equation, operands: list[ArrayLike], run: RunBody) -> list[ArrayLike]:
    loop = loop_of(equation, operands)

    def condition(carried: list[jax.Array]) -> ArrayLike:
        return run(loop.condition, [*loop.tested, *carried])[0]

    def body(carried: list[jax.Array]) -> list[ArrayLike]:
        return list(run(loop.body, [*loop.fixed, *carried]))

    return list(jax.lax.while_loop(condition, body, loop.carried))


def _scan(equation: Equation, operands: list[ArrayLike], run: RunBody) -> list[ArrayLike]:
    loop, params = loop_of(equation, operands), equation.params

    def body(
        carried: list[jax.Array], slices: list[jax.Array]
    ) -> tuple[list[ArrayLike], list[ArrayLike]]:
        results = list(run(loop.body, [*loop.fixed, *carried, *slices]))
        return results[: len(carried)], results[len(carried) :]

    carried, stacked = jax.lax.scan(
        body,
        loop.carried,
        loop.sequences,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carried, *stacked]


def _custom_jvp(equation: Equation, operands: list[ArrayLike], run: RunBody) -> list[ArrayLike]:
    function = jax.custom_jvp(_function(equation.params["call_jaxpr"], run))

    def original(*values: ArrayLike) -> list[jax.Array]:
        return bind(equation, values)

    def jvp(primals: PyTree, tangents: PyTree) -> PyTree:
        return _again(lambda *args: jax.jvp(original, *args), run)(primals, tangents)

    function.defjvp(jvp)
    return list(function(*operands))


def _custom_vjp(equation: Equation, operands: list[ArrayLike], run: RunBody) -> list[ArrayLike]:
    (body,) = sub_jaxprs(equation)
    function = jax.custom_vjp(_function(body, run))

    def original(*values: ArrayLike) -> list[jax.Array]:
        return bind(equation, values)

    def forward(*values: ArrayLike) -> PyTree:
        return _again(lambda *args: jax.vjp(original, *args), run)(*values)

    def backward(pull_back: Callable[..., PyTree], cotangents: PyTree) -> PyTree:
        return _again(lambda cotangents: pull_back(cotangents), run)(cotangents)

    function.defvjp(forward, backward)
    return list(function(*operands))


def _shard_map(equation: Equation, operands: list[ArrayLike], run: RunBody) -> list[ArrayLike]:
    params = equation.params
    function = jax.shard_map(
        _function(params["jaxpr"], run),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=set(shard_map_axes(equation)),
    )
    return list(function(*operands))


_REBUILD: dict[str, Callable[[Equation, list[ArrayLike], RunBody], list[ArrayLike]]] = {
    "jit": _call,
    "pjit": _call,
    "closed_call": _call,
    "core_call": _call,
    "remat2": _checkpoint,
    "checkpoint": _checkpoint,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "shard_map": _shard_map,
}
