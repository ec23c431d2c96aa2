"""Validation of rules: the shapes and dtypes that they return."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..._errors import PrimitiveError
from .. import rules
from ..by_shape import cached_by_shape
from ..derive import expect_keys
from ..primitive import ETPPrimitive, get_primitive_spec
from ..spec import ETPPrimitiveSpec


def validate_rules(
    primitive: ETPPrimitive, params: Mapping[str, Any], x_var: Any, y_var: Any, weight_vars: Any
) -> None:
    """Raise unless every rule fits one equation, by abstract evaluation.

    Parameters
    ----------
    primitive : ETPPrimitive
        The operation.
    params : mapping
        Static parameters of the equation.
    x_var, y_var : object with ``aval``
        Input (None for a primitive without one) and output.
    weight_vars : dict of objects with ``aval``
        Trainable operands by name.

    Raises
    ------
    PrimitiveError
        Naming the primitive, the rule, the key and the shapes.
    """
    avals = {name: var.aval for name, var in weight_vars.items()}
    x = None if x_var is None else x_var.aval
    owners = primitive, get_primitive_spec(primitive)
    _validate(owners, params, x, y_var.aval, avals)


@cached_by_shape
def _validate(
    owners: tuple[ETPPrimitive, ETPPrimitiveSpec],
    params: Mapping[str, Any],
    x: Any,
    y: Any,
    weights: Mapping[str, Any],
) -> None:
    primitive, _ = owners
    step = jax.ShapeDtypeStruct((1, *y.shape), y.dtype)
    steps = None if x is None else jax.ShapeDtypeStruct((1, *x.shape), x.dtype)
    x_var, y_var = None if x is None else Variable(x), Variable(y)
    weight_vars = {name: Variable(weight) for name, weight in weights.items()}
    call = _Caller(primitive, params)

    def init() -> Any:
        return rules.init_trace(primitive, params, x_var, y_var, weight_vars)

    trace = call.run("init_drtrl", init)
    _check_output_trace(call, x_var, y_var, weight_vars)
    gradients = call.run("xy_to_dw", rules.pull_back, steps, step, weights)
    call.expect("xy_to_dw", gradients, weights)
    terms = call.run("accumulate", rules.accumulate, steps, step, weights)
    call.expect("init_drtrl", trace, terms, dtypes=False)
    call.expect("yw_to_w", call.run("yw_to_w", rules.propagate, y, trace), trace)
    call.expect("contract", call.run("contract", rules.contract, y, trace, weights), weights)


@dataclasses.dataclass(frozen=True)
class Variable:
    """An array or its type, used instead of a variable of a jaxpr."""

    aval: Any


class _Caller:
    """Run rules of one equation abstractly, and describe errors in their results."""

    def __init__(self, primitive: ETPPrimitive, params: Mapping[str, Any]):
        self.primitive = primitive
        self.params = params

    def run(self, rule: str, function: Callable[..., Any], *arguments: Any) -> Any:
        bound = (self.primitive, self.params) if arguments else ()
        try:
            return jax.eval_shape(lambda *values: function(*bound, *values), *arguments)
        except PrimitiveError:
            raise
        except Exception as error:
            shapes = jax.tree.map(lambda leaf: tuple(leaf.shape), arguments)
            raise PrimitiveError(
                f"Rule `{rule}` of `{self.primitive}` fails for arguments of shapes {shapes}: "
                f"{error}"
            ) from error

    def expect(
        self,
        rule: str,
        result: Mapping[str, Any],
        expected: Mapping[str, Any],
        *,
        dtypes: bool = True,
    ) -> None:
        expect_keys(get_primitive_spec(self.primitive), rule, dict(result), expected)
        for name, wanted in expected.items():
            shape, dtype = tuple(result[name].shape), result[name].dtype
            is_inexact = jnp.issubdtype(dtype, jnp.inexact)
            for is_right, actual, right in (
                (shape == tuple(wanted.shape), f"shape {shape}", tuple(wanted.shape)),
                (not dtypes or dtype == wanted.dtype, f"dtype {dtype}", wanted.dtype),
                (is_inexact, f"dtype {dtype}", "a floating dtype"),
            ):
                if not is_right:
                    raise PrimitiveError(
                        f"Rule `{rule}` of `{self.primitive}` returned {actual} for `{name}`; "
                        f"expected {right}."
                    )


def _check_output_trace(call: _Caller, x_var: Any, y_var: Any, weight_vars: Any) -> None:
    spec = get_primitive_spec(call.primitive)
    trace = call.run("init_pp", lambda: spec.init_pp(x_var, y_var, weight_vars, 2))
    expected = (*y_var.aval.shape, 2)
    if tuple(getattr(trace, "shape", ())) != expected:
        raise PrimitiveError(
            f"Rule `init_pp` of `{call.primitive}` returned {trace} for two hidden states; "
            f"expected one array of shape {expected}."
        )
