"""Replace marker operations by their plain implementation.

The jaxpr of a function is evaluated again with every marker primitive replaced. Equations
that hold jaxprs (loops, branches, custom derivatives) are rebuilt through JAX's public
functions, and only where there is a marker inside.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._arguments import FUNCTION, check_option
from .._errors import PrimitiveError
from .._jax import bind, is_var, open_jaxpr, scan_counts, shard_map_axes, sub_jaxprs
from .registry import ETP_PRIMITIVES


def inline(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function with every marked operation replaced by plain JAX.

    For tools that know only JAX's own primitives. Inlines what ``fn`` itself computes, its
    loops and branches included; to inline a gradient, give the gradient function.

    Parameters
    ----------
    fn : callable
        Function of arrays (any pytrees, quantities included) without side effects.

    Returns
    -------
    callable
        Same arguments, results and derivatives; nested ``jit`` calls that hold a marked
        operation are flattened.

    Raises
    ------
    OptionError
        If ``fn`` is no function.
    PrimitiveError
        When called, if a marked operation stands inside a construct that cannot be rebuilt.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> plain = braintrace.inline(braintrace.matmul)
    >>> jaxpr = jax.make_jaxpr(plain)(jnp.ones(3), jnp.ones((3, 2)))
    >>> [equation.primitive.name for equation in jaxpr.eqns]
    ['dot_general']
    """
    check_option("fn", fn, FUNCTION, "`inline`: ")

    @functools.wraps(fn)
    def inlined(*args: Any, **kwargs: Any) -> Any:
        jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args, **kwargs)
        results = _evaluate(jaxpr, jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return inlined


def _evaluate(jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    opened, constants = open_jaxpr(jaxpr)
    environment = dict(zip(opened.constvars, constants, strict=True))
    environment.update(zip(opened.invars, values, strict=True))

    def read(atom: Any) -> Any:
        return environment[atom] if is_var(atom) else atom.val

    for equation in opened.eqns:
        results = _evaluate_equation(equation, [read(atom) for atom in equation.invars])
        environment.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in opened.outvars]


def _evaluate_equation(equation: Any, operands: list[Any]) -> Sequence[Any]:
    primitive = equation.primitive
    if primitive in ETP_PRIMITIVES:
        return [primitive.implementation(*operands, **equation.params)]
    if not any(_holds_marker(body) for body in sub_jaxprs(equation)):
        return bind(equation, operands)
    if primitive.name not in _REBUILD:
        raise PrimitiveError(
            f"`inline` cannot rebuild `{primitive.name}`, which holds a marked operation. Inline "
            "the function inside it instead."
        )
    return _REBUILD[primitive.name](equation, operands)


def _holds_marker(jaxpr: Any) -> bool:
    return any(
        equation.primitive in ETP_PRIMITIVES or any(map(_holds_marker, sub_jaxprs(equation)))
        for equation in open_jaxpr(jaxpr)[0].eqns
    )


# --- one function for each kind of equation that holds jaxprs


def _function(jaxpr: Any) -> Callable[..., list[Any]]:
    return lambda *values: _evaluate(jaxpr, values)


def _rebuild_call(equation: Any, operands: list[Any]) -> list[Any]:
    (body,) = sub_jaxprs(equation)
    return _evaluate(body, operands)


def _rebuild_checkpoint(equation: Any, operands: list[Any]) -> list[Any]:
    params = equation.params
    body = _function(params["jaxpr"])
    options = {"policy": params["policy"], "prevent_cse": params["prevent_cse"]}
    return jax.checkpoint(body, **options)(*operands)


def _rebuild_cond(equation: Any, operands: list[Any]) -> list[Any]:
    branches = [_function(branch) for branch in equation.params["branches"]]
    return jax.lax.switch(operands[0], branches, *operands[1:])


def _rebuild_while(equation: Any, operands: list[Any]) -> list[Any]:
    params = equation.params
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    cond_constants = operands[:of_cond]
    body_constants = operands[of_cond : of_cond + of_body]

    def condition(carry: list[Any]) -> Any:
        return _evaluate(params["cond_jaxpr"], [*cond_constants, *carry])[0]

    def body(carry: list[Any]) -> list[Any]:
        return _evaluate(params["body_jaxpr"], [*body_constants, *carry])

    return jax.lax.while_loop(condition, body, operands[of_cond + of_body :])


def _rebuild_scan(equation: Any, operands: list[Any]) -> list[Any]:
    params = equation.params
    constants, carried = scan_counts(equation)

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        results = _evaluate(params["jaxpr"], [*operands[:constants], *carry, *xs])
        return results[:carried], results[carried:]

    carry, ys = jax.lax.scan(
        body,
        operands[constants : constants + carried],
        operands[constants + carried :],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _rebuild_custom_jvp(equation: Any, operands: list[Any]) -> list[Any]:
    rebuilt = jax.custom_jvp(_function(equation.params["call_jaxpr"]))

    def original(*values: Any) -> list[Any]:
        return bind(equation, values)

    @rebuilt.defjvp
    def jvp(primals: Any, tangents: Any) -> Any:
        return inline(lambda *args: jax.jvp(original, *args))(primals, tangents)

    return rebuilt(*operands)


def _rebuild_custom_vjp(equation: Any, operands: list[Any]) -> list[Any]:
    (body,) = sub_jaxprs(equation)
    rebuilt = jax.custom_vjp(_function(body))

    def original(*values: Any) -> list[Any]:
        return bind(equation, values)

    def forward(*values: Any) -> Any:
        return inline(lambda *args: jax.vjp(original, *args))(*values)

    def backward(pull_back: Any, cotangents: Any) -> Any:
        return inline(lambda cotangents: pull_back(cotangents))(cotangents)

    rebuilt.defvjp(forward, backward)
    return rebuilt(*operands)


def _rebuild_shard_map(equation: Any, operands: list[Any]) -> list[Any]:
    params = equation.params
    rebuilt = jax.shard_map(
        _function(params["jaxpr"]),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=set(shard_map_axes(equation)),
    )
    return rebuilt(*operands)


_REBUILD: dict[str, Callable[[Any, list[Any]], list[Any]]] = {
    "jit": _rebuild_call,
    "pjit": _rebuild_call,
    "closed_call": _rebuild_call,
    "core_call": _rebuild_call,
    "remat2": _rebuild_checkpoint,
    "checkpoint": _rebuild_checkpoint,
    "cond": _rebuild_cond,
    "while": _rebuild_while,
    "scan": _rebuild_scan,
    "custom_jvp_call": _rebuild_custom_jvp,
    "custom_vjp_call": _rebuild_custom_vjp,
    "shard_map": _rebuild_shard_map,
}
