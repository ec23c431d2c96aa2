r"""Elementwise parameter: ``etp_elemwise``.

.. math:: y = w

The operation is the identity on an array of any shape. It marks a parameter that enters a model
elementwise, after any function of the parameter alone. It has neither an input nor a batch axis;
the trace is the factor itself, shaped like ``w``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import saiunit

from ..._arguments import FUNCTION, check_arrays, check_option, is_quantity, shown
from ..._errors import DtypeError, OptionError
from ..._foreign import in_words
from ..primitive import ETPPrimitive, register_primitive_spec
from ..spec import ETPPrimitiveSpec
from . import quantities


def _impl(weight: Any) -> Any:
    return weight


def _batching(
    primitive: ETPPrimitive, operands: Sequence[Any], dims: Sequence[Any], params: dict[str, Any]
) -> tuple[Any, Any]:
    return primitive.bind(*operands, **params), dims[0]


etp_elemwise_p = register_primitive_spec(
    ETPPrimitiveSpec(
        name="etp_elemwise",
        impl=_impl,
        trace_axes={"weight": ("output",)},
        x_invar_index=None,
        gradient_enabled=True,
        batching=_batching,
    )
)


def _identity(weight: Any) -> Any:
    return weight


def element_wise(
    weight: Any,
    fn: Callable[[Any], Any] = _identity,
    *,
    weight_fn: Callable[[Any], Any] | None = None,
) -> Any:
    """Mark a parameter that enters the model elementwise, so that it learns online.

    Parameters
    ----------
    weight : array or Quantity of any shape
        Trainable. If the model broadcasts the result against a batched state, each unit that it
        reaches has its own trace.
    fn : callable
        Differentiable function of the weight, applied first; may return a quantity.
    weight_fn : callable, optional
        Another name of ``fn``, as in the other operations.

    Returns
    -------
    array or Quantity
        ``fn(weight)``.

    Raises
    ------
    OptionError
        If ``fn`` is not a function, or is passed under both names.
    DtypeError
        If ``weight`` or ``fn(weight)`` is not a numeric array or quantity, or ``weight`` has no
        derivative: integers and booleans cannot be parameters.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import braintrace
    >>> braintrace.element_wise(jnp.array([1.0, -2.0]), fn=jnp.abs)
    Array([1., 2.], dtype=float32)
    """
    name, function = ("fn", fn) if weight_fn is None else ("weight_fn", weight_fn)
    check_option(name, function, FUNCTION, "`element_wise`: ")
    if weight_fn is not None and fn is not _identity:
        raise OptionError(
            "`element_wise` got both `fn` and `weight_fn`, which are two names of one argument: "
            "leave out one of the two."
        )
    check_arrays("weight", weight, "`element_wise`: ")
    _check_learns(weight)
    with in_words(OptionError, lambda: f"`element_wise`: `{name}` fails for {shown(weight)}"):
        result = function(weight)
    if isinstance(result, (tuple, list, dict)) or result is None:
        raise DtypeError(
            f"`element_wise`: `{name}` of `weight` is {shown(result)}; expected one array. Use a "
            "separate call for each array."
        )
    value, unit = quantities.split("element_wise", f"{name}(weight)", result)
    return quantities.attach(etp_elemwise_p.bind(value), unit)


def _check_learns(weight: Any) -> None:
    """Refuse a weight that a gradient step could not change."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(weight, is_leaf=is_quantity):
        if not jnp.issubdtype(jnp.result_type(saiunit.get_mantissa(leaf)), jnp.inexact):
            name = f"weight{jax.tree_util.keystr(path)}"
            raise DtypeError(
                f"`element_wise`: `{name}` is {shown(leaf)}; expected an array of floating-point "
                "or complex dtype, the value of a `ParamState`. A constant needs no mark."
            )
