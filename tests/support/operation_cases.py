"""Every operation as the input of a diagonal recurrence, beside the same mathematics in plain JAX.

The recurrence is ``h = 0.8 h + tanh(op(x))``: every path from state to state is position by
position, so that D-RTRL has to equal backpropagation through time.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from backpropagation import through_time
from matrices import csr
from ops_catalogue import plain_feedback

import braintrace

DECAY = 0.8
STEPS, BATCH = 4, 2


def normal(seed, *shape):
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape) / 2))


def one_hot(seed, *shape):
    return jax.nn.one_hot(jnp.argmax(normal(seed, *shape), axis=-1), shape[-1])


@dataclasses.dataclass(frozen=True, eq=False)
class OperationCase:
    """``marked(x, parameters)`` and ``plain(x, parameters)`` compute the same.

    ``draw(seed, *shape)`` draws the inputs.
    """

    name: str
    marked: Callable[[Any, Any], Any]
    plain: Callable[[Any, Any], Any]
    sample: tuple[int, ...]
    hidden: tuple[int, ...]
    parameters: dict[str, Any]
    draw: Callable[..., Any] = normal

    @property
    def inputs(self):
        return self.draw(99, STEPS, BATCH, *self.sample)


def conv_case(name, sample, hidden, kernel, bias, numbers, **options):
    specification = jax.lax.conv_dimension_numbers((1, *sample), kernel, numbers)
    shape = [1] * (len(hidden) + 1)
    shape[specification.out_spec[1]] = -1
    lax_options = {**options, "window_strides": options.get("strides", (1,) * (len(sample) - 1))}
    lax_options.pop("strides", None)
    parameters = {"kernel": normal(3, *kernel)} | ({"bias": normal(4, bias)} if bias else {})

    def plain(x, p):
        y = jax.lax.conv_general_dilated(x, p["kernel"], dimension_numbers=numbers, **lax_options)
        return y + p["bias"].reshape(shape) if bias else y

    def marked(x, p):
        batch = x if x.ndim > len(sample) else x[None]
        y = braintrace.conv(batch, p["kernel"], p.get("bias"), dimension_numbers=numbers, **options)
        return y if batch is x else y[0]

    return OperationCase(name, marked, plain, sample, hidden, parameters)


DENSE = np.asarray(normal(5, 3, 4)) * (np.arange(12).reshape(3, 4) % 3 > 0)
SPARSE = csr(DENSE)
PLACES = np.eye(DENSE.size)[np.flatnonzero(DENSE)]


def dense_of(data):
    """By a product: after a change of precision, JAX reuses indices of the other one."""
    return (data @ jnp.asarray(PLACES, data.dtype)).reshape(DENSE.shape)


CASES = [
    OperationCase(
        "matmul",
        lambda x, p: braintrace.matmul(x, p["w"]),
        lambda x, p: x @ p["w"],
        (3,),
        (4,),
        {"w": normal(0, 3, 4)},
    ),
    OperationCase(
        "matmul with bias",
        lambda x, p: braintrace.matmul(x, p["w"], p["b"]),
        lambda x, p: x @ p["w"] + p["b"],
        (3,),
        (5,),
        {"w": normal(0, 3, 5), "b": normal(1, 5)},
    ),
    OperationCase(
        "matmul on more axes",
        lambda x, p: braintrace.matmul(x, p["w"]),
        lambda x, p: x @ p["w"],
        (2, 3),
        (2, 4),
        {"w": normal(0, 3, 4)},
    ),
    OperationCase(
        "element_wise",
        lambda x, p: braintrace.element_wise(p["w"], jnp.exp) + x,
        lambda x, p: jnp.exp(p["w"]) + x,
        (4,),
        (4,),
        {"w": normal(0, 4)},
    ),
    OperationCase(
        "element_wise scalar",
        lambda x, p: braintrace.element_wise(p["w"]) + x,
        lambda x, p: p["w"] + x,
        (4,),
        (4,),
        {"w": normal(0)},
    ),
    conv_case(
        "strided 1-D conv with bias",
        (7, 2),
        (4, 3),
        (3, 2, 3),
        3,
        ("NWC", "WIO", "NWC"),
        strides=(2,),
        padding="SAME",
    ),
    conv_case(
        "dilated 2-D conv, channels first",
        (2, 6, 5),
        (3, 4, 3),
        (3, 2, 2, 2),
        3,
        ("NCHW", "OIHW", "NCHW"),
        rhs_dilation=(2, 2),
        padding="VALID",
    ),
    conv_case(
        "grouped 1-D conv",
        (6, 4),
        (6, 6),
        (3, 2, 6),
        None,
        ("NWC", "WIO", "NWC"),
        padding="SAME",
        feature_group_count=2,
    ),
    conv_case(
        "depthwise 1-D conv with bias",
        (6, 3),
        (6, 6),
        (3, 1, 6),
        6,
        ("NWC", "WIO", "NWC"),
        padding="SAME",
        feature_group_count=3,
    ),
    OperationCase(
        "sparse_matmul with bias",
        lambda x, p: braintrace.sparse_matmul(x, p["data"], sparse_mat=SPARSE, bias=p["b"]),
        lambda x, p: x @ dense_of(p["data"]) + p["b"],
        (3,),
        (4,),
        {"data": SPARSE.data, "b": normal(1, 4)},
    ),
    OperationCase(
        "lora_matmul with bias",
        lambda x, p: braintrace.lora_matmul(x, p["B"], p["A"], alpha=0.7, bias=p["b"]),
        lambda x, p: 0.7 * x @ p["B"] @ p["A"] + p["b"],
        (3,),
        (4,),
        {"B": normal(0, 3, 2), "A": normal(1, 2, 4), "b": normal(2, 4)},
    ),
    OperationCase(
        "feedback_matmul with bias",
        lambda x, p: braintrace.feedback_matmul(x, p["w"], p["feedback"], p["b"]),
        lambda x, p: plain_feedback(x, p["w"], p["feedback"]) + p["b"],
        (3,),
        (4,),
        {"w": normal(0, 3, 4), "feedback": normal(1, 3, 4), "b": normal(2, 4)},
    ),
    OperationCase(
        "grouped_matmul with bias",
        lambda x, p: braintrace.grouped_matmul(x, p["w"], p["b"]),
        lambda x, p: jnp.einsum("...gi,gio->...go", x, p["w"]) + p["b"],
        (2, 3),
        (2, 4),
        {"w": normal(0, 2, 3, 4), "b": normal(1, 2, 4)},
    ),
    OperationCase(
        "einsum in another order, over positions",
        lambda x, p: braintrace.einsum("...tkg,ngk->...gtn", x, p["w"]),
        lambda x, p: jnp.einsum("...tkg,ngk->...gtn", x, p["w"]),
        (2, 3, 2),
        (2, 2, 4),
        {"w": normal(0, 4, 2, 3)},
    ),
    OperationCase(
        "embedding",
        lambda x, p: braintrace.embedding(jnp.argmax(x, axis=-1), p["w"]),
        lambda x, p: x @ p["w"],
        (3,),
        (4,),
        {"w": normal(0, 3, 4)},
        draw=one_hot,
    ),
]


class Diagonal(brainstate.nn.Module):
    """The recurrence, fed by one operation."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.parameters_of = {k: brainstate.ParamState(v) for k, v in case.parameters.items()}

    def init_state(self, batch_size=None, **kwargs):
        batch = () if batch_size is None else (batch_size,)
        self.h = brainstate.HiddenState(jnp.zeros((*batch, *self.case.hidden)))

    def update(self, x):
        values = {name: state.value for name, state in self.parameters_of.items()}
        self.h.value = DECAY * self.h.value + jnp.tanh(self.case.marked(x, values))
        return self.h.value


def loss(h):
    return jnp.sum(h**2 * jnp.linspace(0.5, 1.5, h.size).reshape(h.shape))


def by_name(gradients):
    """Key gradients by the parameter's name alone."""
    return {path[-1]: gradient for path, gradient in gradients.items()}


@functools.cache
def bptt(case):
    """The gradient of the summed loss, by backpropagation through the plain recurrence."""

    def step(parameters, h, x):
        h = DECAY * h + jnp.tanh(case.plain(x, parameters))
        return h, loss(h)

    return through_time(step, case.parameters, jnp.zeros((BATCH, *case.hidden)), case.inputs)


@functools.cache
def es_d_rtrl(case, alpha):
    """The estimate of ES-D-RTRL, term by term from its definition."""
    return jax.jit(functools.partial(_es_d_rtrl, case, alpha))(case.parameters)


def _es_d_rtrl(case, alpha, parameters):
    shape = (BATCH, *case.hidden)

    def step(carried, inputs):
        (h, eps_x, eps_f), (x, t) = carried, inputs
        y = case.plain(x, parameters)
        h = DECAY * h + jnp.tanh(y)
        eps_x = alpha * eps_x + x
        eps_f = alpha * DECAY * eps_f + (1 - alpha) * (1 - jnp.tanh(y) ** 2)
        factor = jax.grad(loss)(h) * eps_f / (1 - alpha**t)
        # The operation is linear in its trainable operands, so that its derivative at the
        # filtered input is the outer product of the definition.
        _, pull_back = jax.vjp(lambda p: case.plain(eps_x, p), parameters)
        return (h, eps_x, eps_f), pull_back(factor)[0]

    start = jnp.zeros(shape), jnp.zeros(case.inputs.shape[1:]), jnp.zeros(shape)
    _, found = jax.lax.scan(step, start, (case.inputs, jnp.arange(1.0, STEPS + 1)))
    return jax.tree.map(lambda leaf: leaf.sum(0), found)
