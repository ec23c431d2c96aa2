"""The ETP operations and the JAX transformations that they must survive.

Each operation stands beside the same mathematics in plain JAX, written independently of the
library.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from matrices import csr

from braintrace import _etrace_op
from braintrace._etrace_op import (
    ETP_PRIMITIVES,
    conv,
    element_wise,
    embedding,
    feedback_matmul,
    grouped_matmul,
    lora_matmul,
    matmul,
    sparse_matmul,
)
from braintrace._jax import open_jaxpr, sub_jaxprs


def array(seed: int, *shape: int, dtype: Any = np.float32) -> jax.Array:
    """Random normal numbers, the same for the same arguments."""
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def quick_jit(function: Callable) -> Callable:
    """Compile without optimisation: the tests compile often and run once."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


# Some are registered when they are first used, which is not to be undone after a test.
_etrace_op.register_every_operation()

_REGISTRIES = [
    _etrace_op.ETP_PRIMITIVES,
    _etrace_op.BATCHED_PRIMITIVES,
    _etrace_op.ETP_PRIMITIVE_SPECS,
    _etrace_op.ETP_RULES_YW_TO_W,
    _etrace_op.ETP_RULES_XY_TO_DW,
    _etrace_op.ETP_RULES_INIT_DRTRL,
    _etrace_op.ETP_RULES_INIT_PP,
]


@contextlib.contextmanager
def restored_registries() -> Iterator[None]:
    """Forget on leaving what was registered inside."""
    saved = [registry.copy() for registry in _REGISTRIES]
    try:
        yield
    finally:
        for registry, content in zip(_REGISTRIES, saved, strict=True):
            registry.clear()
            registry.update(content)


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


# --- transformations: each turns ``f(x, weights)`` into another function of the two


@dataclass(frozen=True)
class Transformation:
    """``apply(f)`` is a function of ``(x, weights)``.

    Attributes
    ----------
    marker
        Attribute of the operation that names the primitive in the jaxpr afterwards, or None
        where the result is no longer a jaxpr (compiled, exported).
    jit
        Whether the test may compile the result; else it runs as it stands.
    """

    name: str
    apply: Callable[[Callable], Callable]
    marker: str | None = "primitive"
    jit: bool = True


def _loss(f: Callable) -> Callable:
    return lambda x, weights: jnp.sum(jnp.sin(f(x, weights)))


def _stack(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf, -leaf]), tree)


def _halved(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: 0.5 * leaf, tree)


def _jvp(f: Callable) -> Callable:
    return lambda x, weights: jax.jvp(f, (x, weights), _halved((x, weights)))


def _vjp(f: Callable) -> Callable:
    def pulled(x: Any, weights: tuple) -> Any:
        y, pull_back = jax.vjp(f, x, weights)
        return y, pull_back(jnp.cos(y))

    return pulled


def _linearize(f: Callable) -> Callable:
    def pushed(x: Any, weights: tuple) -> Any:
        y, push = jax.linearize(f, x, weights)
        return y, push(*_halved((x, weights)))

    return pushed


def _vmap_inputs(f: Callable) -> Callable:
    return lambda x, weights: jax.vmap(f, (0, None))(_stack(x), weights)


def _vmap_last_axis(f: Callable) -> Callable:
    def mapped(x: Any, weights: tuple) -> Any:
        xs = jnp.moveaxis(_stack(x), 0, -1)
        return jax.vmap(f, (-1, None), -1)(xs, weights)

    return mapped


def _vmap_weights(f: Callable) -> Callable:
    return lambda x, weights: jax.vmap(f, (None, 0))(x, _stack(weights))


def _vmap_both(f: Callable) -> Callable:
    return lambda x, weights: jax.vmap(f)(_stack(x), _stack(weights))


def _vmap_nested(f: Callable) -> Callable:
    inner = jax.vmap(f, (0, None))
    return lambda x, weights: jax.vmap(inner, (0, None))(_stack(_stack(x)), weights)


def _jit_vmap_grad(f: Callable) -> Callable:
    per_sample = jax.vmap(jax.value_and_grad(_loss(f), argnums=1), (0, None))
    return lambda x, weights: jax.jit(per_sample)(_stack(x), weights)


def _scan(f: Callable) -> Callable:
    def total(x: Any, weights: tuple) -> Any:
        def step(carry: Any, x_now: Any) -> tuple[Any, Any]:
            y = f(x_now, weights)
            return carry + jnp.sum(jnp.sin(y)), y

        return jax.lax.scan(step, jnp.float32(0), _stack(x))[0]

    return jax.value_and_grad(total, argnums=(0, 1))


def _cond(f: Callable) -> Callable:
    def total(x: Any, weights: tuple) -> Any:
        y = jax.lax.cond(jnp.sum(x) < 1e6, f, lambda x, w: 2 * f(x, w), x, weights)
        return jnp.sum(jnp.sin(y))

    return jax.value_and_grad(total, argnums=(0, 1))


def _while(f: Callable) -> Callable:
    def summed(x: Any, weights: tuple) -> Any:
        def body(carry: tuple) -> tuple:
            i, total = carry
            return i + 1, total + jnp.sum(f(x * total, weights))

        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, jnp.float32(0.1)))[1]

    return summed


def _custom_vjp(f: Callable) -> Callable:
    @jax.custom_vjp
    def clipped(x: Any, weights: tuple) -> Any:
        return f(x, weights)

    def forward(x: Any, weights: tuple) -> Any:
        return jax.vjp(f, x, weights)

    def backward(pull_back: Any, cotangent: Any) -> Any:
        return pull_back(jnp.clip(cotangent, -0.5, 0.5))

    clipped.defvjp(forward, backward)
    return jax.value_and_grad(_loss(clipped), argnums=(0, 1))


def _custom_jvp(f: Callable) -> Callable:
    @jax.custom_jvp
    def doubled(x: Any, weights: tuple) -> Any:
        return f(x, weights)

    @doubled.defjvp
    def _(primals: tuple, tangents: tuple) -> Any:
        y, tangent = jax.jvp(f, primals, tangents)
        return y, 2 * tangent

    return jax.value_and_grad(_loss(doubled), argnums=(0, 1))


def _compiled(f: Callable) -> Callable:
    return lambda x, weights: jax.jit(f).lower(x, weights).compile()(x, weights)


def _exported(f: Callable) -> Callable:
    def call(x: Any, weights: tuple) -> Any:
        exported = export.export(jax.jit(f))(x, weights)
        if importlib.util.find_spec("flatbuffers"):  # JAX serializes through it
            exported = export.deserialize(exported.serialize())
        return exported.call(x, weights)

    return call


def _donated(f: Callable) -> Callable:
    def call(x: Any, weights: tuple) -> Any:
        step = jax.jit(
            lambda x, weights: (f(x, weights), jax.tree.map(lambda w: 2 * w, weights)),
            donate_argnums=1,
        )
        return step(x, jax.tree.map(jnp.copy, weights))

    return call


TRANSFORMATIONS = [
    Transformation("eager", lambda f: f, jit=False),
    Transformation("jit", jax.jit),
    Transformation("grad", lambda f: jax.grad(_loss(f), argnums=(0, 1))),
    Transformation("value_and_grad", lambda f: jax.value_and_grad(_loss(f), argnums=(0, 1))),
    Transformation("jvp", _jvp),
    Transformation("vjp", _vjp),
    Transformation("linearize", _linearize),
    Transformation("hessian", lambda f: jax.hessian(_loss(f), argnums=1), None),
    Transformation("vmap over x", _vmap_inputs, "over_inputs"),
    Transformation("vmap over the last axis of x", _vmap_last_axis, "over_inputs"),
    Transformation("vmap over weights", _vmap_weights, "over_weights"),
    Transformation("vmap over both", _vmap_both, "over_weights"),
    Transformation("nested vmap", _vmap_nested, "over_inputs"),
    Transformation("jit(vmap(grad))", _jit_vmap_grad, "over_inputs"),
    Transformation("checkpoint", lambda f: jax.grad(_loss(jax.checkpoint(f)), argnums=(0, 1))),
    Transformation("inside scan", _scan),
    Transformation("inside cond", _cond),
    Transformation("inside while_loop", _while),
    Transformation("inside custom_vjp", _custom_vjp),
    Transformation("inside custom_jvp", _custom_jvp),
    Transformation("lower().compile()", _compiled, None, jit=False),
    Transformation("jax.export", _exported, None, jit=False),
    Transformation("donated arguments", _donated, None, jit=False),
]


def markers(jaxpr):
    """Names of the ETP primitives in a jaxpr, bodies included."""
    names = set()
    for equation in open_jaxpr(jaxpr)[0].eqns:
        if equation.primitive in ETP_PRIMITIVES:
            names.add(equation.primitive.name)
        for body in sub_jaxprs(equation):
            names |= markers(body)
    return names
