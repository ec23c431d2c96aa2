"""Primitives of this library in JAX: their rules, zeros and derivatives, and their devices.

XLA partitions a program after JAX has lowered it. Some operations have another form on several
devices, and some arrays are kept replicated if XLA would otherwise transfer parts of them
repeatedly.
"""

import contextlib
import contextvars
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ._jax import struct_of

# --- devices of a program


def current_device() -> jax.Device:
    """Return JAX's default device for programs."""
    found = jax.config.jax_default_device
    if not isinstance(found, jax.Device):  # unset, or the name of a platform
        (found, *_) = jax.local_devices(backend=found)
    return found


def devices_of(ctx: Any) -> int:
    """Return the number of devices that a program is lowered for, from its lowering context."""
    return getattr(ctx.module_context.axis_context, "num_devices", None) or 1


_devices: contextvars.ContextVar[int | None] = contextvars.ContextVar("devices", default=None)


@contextlib.contextmanager
def for_devices(count: int | None) -> Iterator[None]:
    """Set the number of devices of the programs traced inside; ``None``: unknown.

    XLA does not simplify branches before it has partitioned a program, so a computation that
    branches share may be repeated in each.
    """
    token = _devices.set(count)
    try:
        yield
    finally:
        _devices.reset(token)


def runs_on_several_devices() -> bool:
    """Test whether the program being traced is known to run on several devices."""
    return (_devices.get() or 1) > 1


# --- a primitive from its implementation


def define_from_impl(primitive: Any, impl: Callable[..., Any], batching_rule: Any) -> None:
    """Define all JAX rules of a single-result primitive from its implementation.

    ``batching_rule(primitive, operands, dims, params)`` returns a result and its batch axis; a
    dimension of ``None`` marks an operand that is not mapped.
    """

    def batched(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        return batching_rule(primitive, operands, dims, params)

    primitive.def_impl(impl)
    primitive.def_abstract_eval(functools.partial(_abstract_result, impl))
    mlir.register_lowering(primitive, functools.partial(_lower_impl, impl))
    ad.primitive_jvps[primitive] = functools.partial(_jvp_from_impl, primitive, impl)
    ad.primitive_transposes[primitive] = functools.partial(_transpose_from_impl, impl)
    batching.primitive_batchers[primitive] = batched


def _lower_impl(impl: Callable[..., Any], ctx: Any, *operands: Any, **params: Any) -> Any:
    function = functools.partial(impl, **params)
    with for_devices(devices_of(ctx)):
        return mlir.lower_fun(function, multiple_results=False)(ctx, *operands)


def _abstract_result(impl: Callable[..., Any], *avals: Any, **params: Any) -> Any:
    (result,) = jax.make_jaxpr(functools.partial(impl, **params))(*avals).out_avals
    return result


def _jvp_from_impl(
    primitive: Any, impl: Callable[..., Any], primals: Any, tangents: Any, **params: Any
) -> tuple[Any, Any]:
    result = primitive.bind(*primals, **params)
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    if not moving:
        return result, zero_tangent(result)

    def of_moving(*values: Any) -> Any:
        operands = list(primals)
        for index, value in zip(moving, values, strict=True):
            operands[index] = value
        return impl(*operands, **params)

    directions = [ad.instantiate_zeros(tangents[i]) for i in moving]
    _, tangent = jax.jvp(of_moving, [primals[i] for i in moving], directions)
    return result, tangent


def _transpose_from_impl(
    impl: Callable[..., Any], cotangent: Any, *operands: Any, **params: Any
) -> list[Any]:
    unknown = [i for i, operand in enumerate(operands) if ad.is_undefined_primal(operand)]
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(operands[i].aval) if i in unknown else None for i in range(len(operands))]

    def of_unknown(*values: Any) -> Any:
        filled = list(operands)
        for index, value in zip(unknown, values, strict=True):
            filled[index] = value
        return impl(*filled, **params)

    results = jax.linear_transpose(of_unknown, *(operands[i].aval for i in unknown))(cotangent)
    by_index = dict(zip(unknown, results, strict=True))
    return [by_index.get(i) for i in range(len(operands))]


def run_on_one_cpu(primitive: Any, impl: Callable[..., Any], chosen: Callable[..., Any]) -> None:
    """Lower a primitive to another function if a program runs on one device, a CPU.

    Its derivatives and batching rules still use ``impl``. Exported programs also contain ``impl``:
    the machine that runs them may not have the kernel.
    """

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        module = ctx.module_context
        is_alone = getattr(module.axis_context, "num_devices", None) == 1
        is_here = is_alone and not module.lowering_parameters.for_export
        return _lower_impl(chosen if is_here else impl, ctx, *operands, **params)

    mlir.register_lowering(primitive, lower, platform="cpu")


_CSR_KERNEL = "cpu_csr_sparse_dense_ffi"


def has_csr_kernel() -> bool:
    """Test whether this version of JAX has its CPU kernel for sparse matrices."""
    try:
        # The former lists the kernels, the latter registers them with XLA.
        registrations = importlib.import_module("jaxlib.cpu_sparse").registrations()
        importlib.import_module("jax.experimental.sparse")
    except (ImportError, AttributeError):
        return False
    return _CSR_KERNEL in {name for name, *_ in registrations.get("cpu", ())}


def csr_kernel(result: jax.ShapeDtypeStruct) -> Callable[..., Any]:
    """Return ``(data, pointers, columns, dense) -> result``: a product with a CSR matrix."""
    return jax.ffi.ffi_call(_CSR_KERNEL, result)


def zero_tangent(value: Any) -> Any:
    """Return the symbolic zero that is the tangent of a value."""
    return ad.Zero(jax.typeof(value).to_tangent_aval())


# --- a value with the derivative of another


def _first(value: Any, other: Any) -> Any:
    return value


def _jvp_of_other(operands: Any, tangents: Any) -> Any:
    value = _with_derivative_p.bind(*operands)
    is_zero = isinstance(tangents[1], ad.Zero)
    return value, zero_tangent(value) if is_zero else tangents[1]


def _batched_value(operands: Any, dims: Any) -> tuple[Any, int]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
    ]
    return _with_derivative_p.bind(*moved), 0


_with_derivative_p = Primitive("with_derivative_of")
_with_derivative_p.def_impl(_first)
_with_derivative_p.def_abstract_eval(_first)
mlir.register_lowering(_with_derivative_p, mlir.lower_fun(_first, multiple_results=False))
ad.primitive_jvps[_with_derivative_p] = _jvp_of_other
batching.primitive_batchers[_with_derivative_p] = _batched_value


def with_derivative_of(value: Any, other: Any) -> Any:
    """Return a value with the derivative of another value of the same type.

    The other value is computed only if a derivative is taken. The derivative of the value itself is
    zero, which a ``stop_gradient`` in the program shows.
    """
    return _with_derivative_p.bind(jax.lax.stop_gradient(value), other)


def without_derivative(sources: Any, results: Any, kind: type[Exception], message: str) -> Any:
    """Return results that raise an error if their gradient is taken.

    This includes results that hold their sources constant, whose derivative would be zero.
    """

    def refuse(residuals: None, cotangents: Any) -> Any:
        raise kind(message)

    refused = jax.custom_vjp(lambda sources, results: results)
    refused.defvjp(lambda sources, results: (results, None), refuse)
    return refused(sources, results)


# --- zeros that are batched by vmap


def _zeros(*operands: Any, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> list[jax.Array]:
    return [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]


def _abstract_zeros(*operands: Any, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> list[Any]:
    return [jax.core.ShapedArray(shape.shape, shape.dtype) for shape in shapes]


def _batched_zeros(operands: Any, dims: Any, *, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    batched = tuple(jax.ShapeDtypeStruct((size, *s.shape), s.dtype) for s in shapes)
    return _zeros_p.bind(*operands, shapes=batched), [0] * len(shapes)


def _jvp_of_zeros(operands: Any, _: Any, *, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
    zeros = _zeros_p.bind(*operands, shapes=shapes)
    return zeros, list(map(zero_tangent, zeros))


_zeros_p = Primitive("zeros_mapped_like")
_zeros_p.multiple_results = True
_zeros_p.def_impl(_zeros)
_zeros_p.def_abstract_eval(_abstract_zeros)
mlir.register_lowering(_zeros_p, mlir.lower_fun(_zeros, multiple_results=True))
ad.primitive_jvps[_zeros_p] = _jvp_of_zeros
batching.primitive_batchers[_zeros_p] = _batched_zeros


def zeros_mapped_like(tree: Any, operands: Any) -> Any:
    """Return zeros like the arrays of a tree, batched by every ``vmap`` over an operand.

    Constant zeros are shared by all elements of a ``vmap``, so their cotangent is the sum over
    these elements. The nominal dependence on operands has no cost.
    """
    leaves, structure = jax.tree.flatten(tree)
    shapes = tuple(map(struct_of, leaves))
    return jax.tree.unflatten(structure, _zeros_p.bind(*jax.tree.leaves(operands), shapes=shapes))


# --- ring buffers


def mirrored(value: Any, start: Any, *, axis: int) -> Any:
    """Return an array with element ``(start - j) mod n`` at place ``j`` of an axis of length n.

    Applied twice, it returns the array as it was.
    """
    size = value.shape[axis]
    back = jnp.flip(value, axis)
    twice = jnp.concatenate([back, back], axis)
    return jax.lax.dynamic_slice_in_dim(twice, (size - 1 - start) % size, size, axis)


def _batched_mirror(primitive: Any, operands: Any, dims: Any, params: Any) -> tuple[Any, int]:
    return jax.vmap(functools.partial(mirrored, **params), dims)(*operands), 0


MIRROR = Primitive("mirror")
"""The same as a primitive, which loops over time recognise."""
define_from_impl(MIRROR, mirrored, _batched_mirror)
