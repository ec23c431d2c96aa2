"""The operations of the networks: the library's, and the same in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import saiunit

import braintrace

from .networks import Sparsity


class MarkedOps:
    """The operations of the library that is being timed."""

    def mixing(self, value: Any) -> Any:
        """Return a state on its way into an operation that couples elements."""
        return value

    def matmul(self, name: str, x: Any, weight: Any) -> Any:
        return braintrace.matmul(x, weight)

    def element_wise(self, name: str, weight: Any) -> Any:
        return braintrace.element_wise(weight)

    def conv(self, name: str, x: Any, kernel: Any) -> Any:
        return braintrace.conv(x, kernel)

    def lora_matmul(self, name: str, x: Any, B: Any, A: Any) -> Any:
        return braintrace.lora_matmul(x, B, A)

    def sparse_matmul(self, name: str, x: Any, weight: Any, sparsity: Sparsity) -> Any:
        entries = jnp.ones(sparsity.rows.size, x.dtype)
        matrix = saiunit.sparse.COO(
            (entries, sparsity.rows, sparsity.columns), shape=sparsity.shape
        )
        return braintrace.sparse_matmul(x, weight, sparse_mat=matrix)


class PlainOps:
    """Plain JAX.

    Parameters
    ----------
    cut_mixing
        Whether states that enter an operation count as constant: D_RTRL leaves the paths through
        recurrent weights out.
    inputs
        ``{name of an operation: x}``, used instead of the operation's own input.
    """

    def __init__(self, cut_mixing: bool = False, inputs: dict[str, Any] | None = None) -> None:
        self._cut_mixing = cut_mixing
        self._given = inputs or {}
        self.inputs: dict[str, Any] = {}

    def mixing(self, value: Any) -> Any:
        """Return a state on its way into an operation that couples elements."""
        return jax.lax.stop_gradient(value) if self._cut_mixing else value

    def _input(self, name: str, x: Any) -> Any:
        self.inputs[name] = self._given.get(name, x)
        return self.inputs[name]

    def matmul(self, name: str, x: Any, weight: Any) -> Any:
        return self._input(name, x) @ weight

    def element_wise(self, name: str, weight: Any) -> Any:
        return weight

    def conv(self, name: str, x: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(self._input(name, x), kernel, (1, 1), "SAME")

    def lora_matmul(self, name: str, x: Any, B: Any, A: Any) -> Any:
        return self._input(name, x) @ B @ A

    def sparse_matmul(self, name: str, x: Any, weight: Any, sparsity: Sparsity) -> Any:
        terms = jnp.moveaxis(self._input(name, x)[:, sparsity.rows] * weight, -1, 0)
        sums = jax.ops.segment_sum(terms, sparsity.columns, num_segments=sparsity.shape[1])
        return jnp.moveaxis(sums, 0, -1)
