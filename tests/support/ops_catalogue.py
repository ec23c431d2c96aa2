"""The ETP operations and the JAX transformations that they must survive.

Each operation stands beside the same mathematics in plain JAX, written independently of the
library.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matrices import csr

from braintrace import _etrace_op
from braintrace._etrace_op import (
    conv,
    element_wise,
    embedding,
    feedback_matmul,
    grouped_matmul,
    lora_matmul,
    matmul,
    sparse_matmul,
)


def array(seed: int, *shape: int, dtype: Any = np.float32) -> jax.Array:
    """Random normal numbers, the same for the same arguments."""
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(dtype))


@dataclass(frozen=True)
class Operation:
    """One primitive: ``marked(x, weights)`` and ``plain(x, weights)`` compute the same.

    Attributes
    ----------
    over_inputs, over_weights
        The primitive in the jaxpr after ``vmap`` over the inputs or over the weights; None
        where only the plain implementation remains.
    """

    primitive: str
    marked: Callable[[Any, tuple], Any]
    plain: Callable[[Any, tuple], Any]
    x: Any
    weights: tuple
    over_inputs: str | None
    over_weights: str | None = None

    @property
    def batched(self) -> bool:
        """Whether ``x`` has an axis of samples in front."""
        return self.primitive in {p.name for p in _etrace_op.BATCHED_PRIMITIVES}


DENSE = np.where(
    np.random.default_rng(9).random((3, 4)) < 0.6, np.random.default_rng(8).normal(size=(3, 4)), 0
).astype(np.float32)
ROWS, COLUMNS = np.nonzero(DENSE)
CSR = csr(DENSE)
ENTRIES = jax.device_put(DENSE[ROWS, COLUMNS])


def dense_from_entries(entries: Any) -> Any:
    """The dense matrix of the sparse pattern, as the oracle of the sparse product."""
    return jnp.zeros(DENSE.shape, entries.dtype).at[ROWS, COLUMNS].set(entries)


def _plain_matmul(x: Any, weights: tuple) -> Any:
    return x @ weights[0] + weights[1]


def plain_feedback(x: Any, weight: Any, feedback: Any) -> Any:
    """``x @ weight`` with a gradient for ``x`` by ``feedback``, and by ``x`` for both matrices.

    A sum of three terms with a way back each; the first has the value, and the others are zero.
    """
    held, fixed = jax.lax.stop_gradient(x), jax.lax.stop_gradient(feedback)
    to_x, to_feedback = x @ fixed, held @ feedback
    return held @ weight + sum(y - jax.lax.stop_gradient(y) for y in (to_x, to_feedback))


def _plain_feedback(x: Any, weights: tuple) -> Any:
    return plain_feedback(x, *weights[:2]) + weights[2]


def _plain_grouped(x: Any, weights: tuple) -> Any:
    return jnp.einsum("...gi,gio->...go", x, weights[0]) + weights[1]


def _plain_sparse(x: Any, weights: tuple) -> Any:
    return x @ dense_from_entries(weights[0]) + weights[1]


def _plain_lora(x: Any, weights: tuple) -> Any:
    return 0.5 * (x @ weights[0] @ weights[1]) + weights[2]


def _plain_embedding(x: Any, weights: tuple) -> Any:
    return weights[0][jnp.argmax(x, axis=-1)]


_WIDTH = ("NWC", "WIO", "NWC")


def _marked_conv(x: Any, weights: tuple) -> Any:
    return conv(x, *weights, strides=2, padding="SAME", dimension_numbers=_WIDTH)


def _plain_conv(x: Any, weights: tuple) -> Any:
    y = jax.lax.conv_general_dilated(x, weights[0], (2,), "SAME", dimension_numbers=_WIDTH)
    return y + weights[1]


def _marked_matmul(x: Any, weights: tuple) -> Any:
    return matmul(x, *weights)


def _marked_feedback(x: Any, weights: tuple) -> Any:
    return feedback_matmul(x, *weights)


def _marked_grouped(x: Any, weights: tuple) -> Any:
    return grouped_matmul(x, *weights)


def _marked_sparse(x: Any, weights: tuple) -> Any:
    return sparse_matmul(x, weights[0], sparse_mat=CSR, bias=weights[1])


def _marked_lora(x: Any, weights: tuple) -> Any:
    return lora_matmul(x, weights[0], weights[1], alpha=0.5, bias=weights[2])


def _marked_embedding(x: Any, weights: tuple) -> Any:
    return embedding(jnp.argmax(x, axis=-1), *weights)


_BATCH, _SAMPLE, _BIAS = array(0, 2, 3), array(1, 3), array(2, 4)
_MATRIX = (array(3, 3, 4), _BIAS)
_FEEDBACK = (_MATRIX[0], array(10, 3, 4), _BIAS)
_GROUPS, _GROUPED = array(11, 3, 2, 3), (array(12, 2, 3, 4), array(13, 2, 4))
_SPARSE = (ENTRIES, _BIAS)
_LORA = (array(4, 3, 2), array(5, 2, 4), _BIAS)

OPERATIONS = [
    Operation("etp_mm", _marked_matmul, _plain_matmul, _BATCH, _MATRIX, "etp_mm"),
    Operation("etp_mv", _marked_matmul, _plain_matmul, _SAMPLE, _MATRIX, "etp_mm"),
    Operation(
        "etp_elemwise",
        lambda x, weights: x * element_wise(weights[0], jnp.tanh),
        lambda x, weights: x * jnp.tanh(weights[0]),
        _SAMPLE,
        (array(6, 3),),
        "etp_elemwise",
        "etp_elemwise",
    ),
    Operation(
        "etp_conv",
        _marked_conv,
        _plain_conv,
        array(7, 2, 5, 2),
        (array(8, 3, 2, 3), array(9, 3)),
        "etp_conv",
    ),
    Operation("etp_sp_mm", _marked_sparse, _plain_sparse, _BATCH, _SPARSE, "etp_sp_mm"),
    Operation("etp_sp_mv", _marked_sparse, _plain_sparse, _SAMPLE, _SPARSE, "etp_sp_mm"),
    Operation("etp_lora_mm", _marked_lora, _plain_lora, _BATCH, _LORA, "etp_lora_mm"),
    Operation("etp_lora_mv", _marked_lora, _plain_lora, _SAMPLE, _LORA, "etp_lora_mm"),
    Operation("etp_fb_mm", _marked_feedback, _plain_feedback, _BATCH, _FEEDBACK, "etp_fb_mm"),
    Operation("etp_fb_mv", _marked_feedback, _plain_feedback, _SAMPLE, _FEEDBACK, "etp_fb_mm"),
    Operation("etp_gmm", _marked_grouped, _plain_grouped, _GROUPS, _GROUPED, "etp_gmm"),
    Operation("etp_gmv", _marked_grouped, _plain_grouped, _GROUPS[0], _GROUPED, "etp_gmm"),
    Operation("etp_embed", _marked_embedding, _plain_embedding, _BATCH, _MATRIX[:1], "etp_embed"),
    Operation("etp_row", _marked_embedding, _plain_embedding, _SAMPLE, _MATRIX[:1], "etp_embed"),
]
