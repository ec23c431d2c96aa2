"""Rules of JAX for a primitive from its implementation, and XLA's kernel for sparse matrices."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir

from ._jax_derivatives import zero_tangent
from ._jax_devices import devices_of, for_devices


def define_from_impl(primitive: Any, impl: Callable[..., Any], batching_rule: Any) -> None:
    """Define all JAX rules of a single-result primitive from its implementation.

    ``batching_rule(primitive, operands, dims, params)`` returns a result and its batch axis; a
    dimension of ``None`` marks an operand that is not mapped.
    """

    def plain(*operands: Any, **params: Any) -> Any:
        return impl(*operands, **params)

    def batched(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, int]:
        result, axis = batching_rule(primitive, operands, dims, params)
        return result, axis

    primitive.def_impl(plain)
    primitive.def_abstract_eval(functools.partial(_abstract_result, impl))
    mlir.register_lowering(primitive, functools.partial(_lower_impl, plain))
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
    kernel: Callable[..., Any] = jax.ffi.ffi_call(_CSR_KERNEL, result)
    return kernel
