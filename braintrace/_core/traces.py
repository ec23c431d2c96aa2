"""Traces between chunks, in the form that their specifications describe."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .._errors import OptionError
from .._graph import Traces, TraceSpec, TraceSpecs, specs_of
from .products.complex_packing import pack_like, unpack


def stored_specs(specs: TraceSpecs, dtype: DTypeLike | None) -> TraceSpecs:
    """Return the specifications of the stored arrays.

    Parameters
    ----------
    specs
        Trace specifications of a method.
    dtype
        Floating-point dtype of stored traces; ``None``: the model's dtype.
    """

    def kept(spec: TraceSpec) -> TraceSpec:
        is_other = spec.takes_trace_dtype and jnp.issubdtype(spec.dtype, jnp.floating)
        return dataclasses.replace(spec, dtype=dtype) if is_other else spec

    stored = _stored(specs)
    return stored if dtype is None else jax.tree.map(kept, stored)


def _stored(specs: TraceSpecs) -> TraceSpecs:
    result: dict[str, Any] = {}
    for key, entry in specs.items():
        if isinstance(entry, TraceSpec):
            if entry.is_stored:
                result[key] = entry
        elif (inner := _stored(entry)) or not entry:
            result[key] = inner
    return result


def starting_traces(specs: TraceSpecs) -> Traces:
    """Return the initial traces of a sequence; zero traces are given by their shapes."""

    def start(spec: TraceSpec) -> jax.Array | jax.ShapeDtypeStruct:
        if isinstance(spec.initial, (int, float)) and spec.initial == 0:
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype)
        return jnp.broadcast_to(jnp.asarray(spec.initial, spec.dtype), spec.shape)

    traces: Traces = jax.tree.map(start, specs)
    return traces


def outliving(specs: TraceSpecs) -> list[str]:
    """Return the keys of traces that a reset does not change."""
    result = specs.items()
    return [key for key, s in result if isinstance(s, TraceSpec) and s.outlives_reset]


def reset_traces(specs: TraceSpecs, traces: Traces, flags: jax.Array) -> Traces:
    """Return traces that are reset where flags, one per sample or one for all, are true.

    They are selected, not multiplied by zero: they may be NaN. Traces that outlive a reset
    continue.

    Raises
    ------
    OptionError
        If samples that share an array are to be reset separately.
    """

    def chosen(spec: TraceSpec, trace: jax.Array) -> jax.Array:
        if spec.outlives_reset:
            return trace
        return jnp.where(_at_entries(spec, flags), spec.initial, trace)

    return pack_like(jax.tree.map(chosen, specs, unpack(traces)), traces)


def samples_with(
    test: Callable[[jax.Array], jax.Array], specs: TraceSpecs, traces: Traces, samples: int
) -> jax.Array:
    """Return the samples that have an entry in their traces that passes a test.

    Samples are tested one after the other, so no array is larger than the traces.

    Raises
    ------
    OptionError
        If samples share an array.
    """

    def of_sample(flags: jax.Array) -> jax.Array:
        def passes(spec: TraceSpec, trace: jax.Array) -> jax.Array:
            if spec.outlives_reset or not jnp.issubdtype(trace.dtype, jnp.inexact):
                return jnp.zeros((), bool)
            is_other = _at_entries(spec, ~flags)
            # The test stays in the loop: before it, XLA would store a flag for every entry.
            return jnp.any(test(jnp.where(is_other, 0, trace)))

        result = jax.tree.leaves(jax.tree.map(passes, specs, traces))
        return jnp.any(jnp.stack([jnp.zeros((), bool), *result]))

    flags: jax.Array = jax.lax.map(of_sample, jnp.eye(samples, dtype=bool))
    return flags


def _at_entries(spec: TraceSpec, flags: jax.Array) -> jax.Array:
    """Return flags of samples, one for all or one for each, at the entries of a trace."""
    if spec.samples is not None:
        return spec.samples(flags)
    if flags.ndim == 0:
        return flags
    if "batch" not in spec.axes:
        raise OptionError(
            f"All samples share the trace '{spec.operand}' of shape {spec.shape}, so this "
            "algorithm cannot reset single samples. Give `reset` one value per step."
        )
    axis = spec.axes.index("batch")
    return flags.reshape([size if a == axis else 1 for a, size in enumerate(spec.shape)])


def size_in_bytes(specs: TraceSpecs) -> int:
    """Return the total size of the arrays."""
    return sum(spec.nbytes for spec in specs_of(specs))
