"""Trace specifications: shape, dtype and axes of each array that a rule carries."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

TraceSpecs: TypeAlias = Mapping[str, Any]
"""The structure of traces, with a `TraceSpec` in the place of each array."""

Record = Literal["x", "values", "states", "step", "traces", "operands"]
"""Residuals that can be recorded of a step; see `Records`.

``'values'``: what its local steps read. ``'step'``: the inputs of its program. ``'traces'``: the
traces before the step; chunks then have one step, whatever length is requested, and the gradient is
the gradient of a single step. ``'operands'``: the operands of products with parameters. Under a
full-Jacobian rule, gradients can then be taken with respect to these operands, as well as to the
parameters themselves."""

Role = Literal["batch", "fan_out", "spatial", "group", "input", "output", "entry", "state"]
"""The meaning of an axis of a trace: samples, units that one output reaches, places of a
convolution, its groups, inputs, outputs, other entries, or the elements of a sample's flattened
state."""


@dataclasses.dataclass(frozen=True, eq=False)
class TraceSpec:
    """One array of the traces.

    Attributes
    ----------
    shape, dtype
        Shape and dtype of the array, in the dtype of the model.
    axes
        The meaning of each axis.
    relation
        Key of the relation that it belongs to; ``None``: none.
    state, operand
        Names of the state that it follows (``None``: no single one) and of the array, for reports.
    initial
        Value at the start of a sequence: a number, or an array of this shape.
    takes_trace_dtype
        Whether it has the dtype that a user gives as ``trace_dtype``.
    outlives_reset
        Whether it continues when a sequence is reset, for some samples or all, like a random
        stream. It then has a key at the top level of the traces.
    full_shape
        The shape if structural zeros were stored as well; ``None``: there are none.
    samples
        ``flags -> array``: for every entry, whether the flag of its sample is set, given one flag
        for all samples or one for each. An entry that all samples share is set if all flags are.
        ``None``: its axis ``'batch'`` has the samples.
    packed_with
        Key of another trace that may be stored together with it, as real and imaginary part of one
        complex array; see `complex_packing`.
    rule
        Name of the rule that carries it, in a model with several.
    behind
        Names of the States with earlier values that it serves instead of traces of their own.

    Examples
    --------
    The key of a random stream, which a `Rule` keeps through resets:

    >>> import braintrace, jax, jax.numpy as jnp
    >>> key = jax.random.PRNGKey(0)
    >>> spec = braintrace.TraceSpec((2,), jnp.uint32, ("entry",), initial=key, outlives_reset=True)
    >>> spec.nbytes
    8
    """

    shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike
    axes: tuple[Role, ...]
    relation: str | None = None
    state: str | None = None
    operand: str = ""
    initial: float | jax.Array = 0
    takes_trace_dtype: bool = True
    outlives_reset: bool = False
    full_shape: tuple[int, ...] | None = None
    samples: Callable[[jax.Array], jax.Array] | None = None
    packed_with: str | None = None
    rule: str | None = None
    behind: str = ""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * int(np.dtype(self.dtype).itemsize)


def specs_of(specs: TraceSpecs) -> list[TraceSpec]:
    """Return the specifications of all arrays, in order."""
    arrays = []
    for entry in specs.values():
        arrays += [entry] if isinstance(entry, TraceSpec) else specs_of(entry)
    return arrays
