"""Whether a batched operation of a user computes each sample separately."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._errors import PrimitiveError
from ..primitive import ETPPrimitive, get_primitive_spec

_OWN = __name__.partition(".")[0]


def check_samples(
    primitive: ETPPrimitive, params: Mapping[str, Any], operands: Sequence[Any]
) -> None:
    """Refuse a batched operation whose result for a sample depends on other samples.

    A trace has one entry per sample, so it cannot represent such a derivative. The implementation
    is run with random numbers, for two samples and for each of them.

    Parameters
    ----------
    primitive, params
        The operation, and its static parameters.
    operands
        Shapes and dtypes of the operands.

    Raises
    ------
    PrimitiveError
        If the results differ.
    """
    spec = get_primitive_spec(primitive)
    module = getattr(primitive.implementation, "__module__", None) or ""
    index = spec.x_invar_index
    if not spec.batched or index is None or module.partition(".")[0] == _OWN:
        return
    generator = np.random.default_rng(0)

    def result_for(x: Any) -> Any:
        arguments = [*values[:index], x, *values[index + 1 :]]
        return np.asarray(primitive.implementation(*arguments, **params))

    try:
        values = [_random(generator, aval.shape, aval.dtype) for aval in operands]
        pair = _random(generator, (2, *operands[index].shape[1:]), operands[index].dtype)
        with jax.ensure_compile_time_eval(), jax.default_matmul_precision("highest"):
            both = result_for(pair)
            alone = np.concatenate([result_for(pair[:1]), result_for(pair[1:])])
        tolerance = min(1e3 * float(jnp.finfo(both.dtype).eps), 0.05)
        is_separate = np.allclose(both, alone, rtol=tolerance, atol=tolerance, equal_nan=True)
    except Exception:  # an implementation for one batch size, or for numbers of one kind
        return
    if not is_separate:
        raise PrimitiveError(
            f"`{primitive}` is declared with `batched=True`, but its result for a sample depends "
            "on the other samples, or on their number. Traces are kept for each sample alone: "
            "compute what the samples share outside of the operation."
        )


def _random(generator: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return positive numbers for a floating dtype, and zeros for others, which may be indices."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return np.zeros(shape, dtype)
    return generator.uniform(0.5, 1.5, shape).astype(dtype)
