"""The operations, each with the library's functions and with the same mathematics in plain JAX.

A row is one function of ``(ops, x, p)``: of either set of functions, inputs with any leading axes,
and parameters by name.
"""

import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

import braintrace

BATCH, STEPS = 2, 4


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape) / 2


class Plain:
    """The operations in plain JAX."""

    element_wise = staticmethod(lambda w, fn: fn(w))
    embedding = staticmethod(lambda indices, w: jnp.asarray(w)[indices])
    einsum = staticmethod(jnp.einsum)

    @staticmethod
    def matmul(x, w, b=0.0):
        return x @ w + b

    @staticmethod
    def lora_matmul(x, B, A, alpha, bias):
        return alpha * (x @ B @ A) + bias

    @staticmethod
    def grouped_matmul(x, w, b):
        return jnp.einsum("...gi,gio->...go", x, w) + b

    @staticmethod
    def sparse_matmul(x, data, sparse_mat, bias):
        rows = np.repeat(np.arange(len(sparse_mat.indptr) - 1), np.diff(sparse_mat.indptr))
        places = np.zeros((len(rows), *sparse_mat.shape))
        places[np.arange(len(rows)), rows, sparse_mat.indices] = 1
        return x @ jnp.tensordot(data, jnp.asarray(places, data.dtype), 1) + bias

    @staticmethod
    def feedback_matmul(x, w, feedback, b):
        """Three terms with a way back each; the first has the value, and the others are zero."""
        stop = jax.lax.stop_gradient
        to_x, to_feedback = x @ stop(feedback), stop(x) @ feedback
        return stop(x) @ w + sum(y - stop(y) for y in (to_x, to_feedback)) + b

    @staticmethod
    def conv(x, kernel, bias=None, *, strides=None, padding="SAME", dimension_numbers, **options):
        strides = strides or (1,) * (x.ndim - 2)
        options["dimension_numbers"] = dimension_numbers
        y = jax.lax.conv_general_dilated(x, kernel, strides, padding, **options)
        if bias is None:
            return y
        shape = [1] * y.ndim
        numbers = jax.lax.conv_dimension_numbers(x.shape, kernel.shape, dimension_numbers)
        shape[numbers.out_spec[1]] = -1
        return y + bias.reshape(shape)


PLAIN = Plain()


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """One row.

    sample: shape of the inputs of one sample.
    unit: of the result, of inputs in mV and parameters in the units of `with_units`.
    """

    name: str
    of: Callable
    sample: tuple[int, ...]
    p: dict[str, np.ndarray]
    unit: u.Unit = u.mA

    def marked(self, x, p):
        return self.of(braintrace, x, p)

    def plain(self, x, p):
        return self.of(PLAIN, x, p)

    def inputs(self, *lead):
        return normal(99, *lead, *self.sample)

    @property
    def hidden(self):
        """Shape of the outputs of one sample."""
        return jax.eval_shape(self.plain, self.inputs(1), self.p).shape[1:]

    def with_units(self):
        """The same parameters in units: products in siemens, biases in another unit of amperes."""
        units = {"A": 1.0, "b": 1e3 * u.uA}
        return {name: value * units.get(name, u.siemens) for name, value in self.p.items()}

    def equation(self):
        """The equation of its primitive, of a batch."""
        jaxpr = jax.make_jaxpr(self.marked)(self.inputs(BATCH), self.p)
        (found,) = (e for e in jaxpr.eqns if e.primitive.name.startswith("etp_"))
        return found


def bent(w):
    return w * (1 + 0.3 * jnp.abs(u.get_mantissa(w)))


def convolution(name, sample, kernel, bias, numbers, **options):
    """A convolution of a batch; one sample is a batch of one."""

    def of(ops, x, p):
        batch = x.reshape((-1, *sample))
        y = ops.conv(batch, p["kernel"], p.get("b"), dimension_numbers=numbers, **options)
        return y.reshape((*x.shape[: -len(sample)], *y.shape[1:]))

    p = {"kernel": normal(3, *kernel)} | ({"b": normal(4, bias)} if bias else {})
    return Operation(name, of, sample, p)


DENSE = normal(5, 3, 4) * (np.arange(12).reshape(3, 4) % 3 > 0)
ROWS, COLUMNS = (places.astype(np.int32) for places in np.nonzero(DENSE))
STARTS = np.searchsorted(ROWS, np.arange(4)).astype(np.int32)
SPARSE = u.sparse.CSR((DENSE[ROWS, COLUMNS], COLUMNS, STARTS), shape=(3, 4))
WIDTH, PLANE = ("NWC", "WIO", "NWC"), ("NCHW", "OIHW", "NCHW")
MATRIX, BIAS = normal(0, 3, 4), normal(1, 4)

OPERATIONS = [
    Operation(
        "matmul", lambda ops, x, p: ops.matmul(x, p["w"], p["b"]), (3,), {"w": MATRIX, "b": BIAS}
    ),
    Operation(
        "matmul on more axes", lambda ops, x, p: ops.matmul(x, p["w"]), (2, 3), {"w": MATRIX}
    ),
    Operation(
        "element_wise",
        lambda ops, x, p: x * ops.element_wise(p["w"], bent),
        (4,),
        {"w": normal(2, 4)},
    ),
    convolution("conv 1-D", (7, 2), (3, 2, 3), 3, WIDTH, strides=(2,), padding="SAME"),
    convolution("conv 2-D", (2, 6, 5), (3, 2, 2, 2), 3, PLANE, rhs_dilation=(2, 2)),
    convolution("conv grouped", (6, 4), (3, 2, 6), None, WIDTH, feature_group_count=2),
    convolution("conv depthwise", (6, 3), (3, 1, 6), 6, WIDTH, feature_group_count=3),
    Operation(
        "sparse_matmul",
        lambda ops, x, p: ops.sparse_matmul(x, p["data"], sparse_mat=SPARSE, bias=p["b"]),
        (3,),
        {"data": DENSE[ROWS, COLUMNS], "b": BIAS},
    ),
    Operation(
        "lora_matmul",
        lambda ops, x, p: ops.lora_matmul(x, p["B"], p["A"], alpha=0.7, bias=p["b"]),
        (3,),
        {"B": normal(0, 3, 2), "A": normal(1, 2, 4), "b": BIAS},
    ),
    Operation(
        "feedback_matmul",
        lambda ops, x, p: ops.feedback_matmul(x, p["w"], p["feedback"], p["b"]),
        (3,),
        {"w": MATRIX, "feedback": normal(2, 3, 4), "b": BIAS},
    ),
    Operation(
        "grouped_matmul",
        lambda ops, x, p: ops.grouped_matmul(x, p["w"], p["b"]),
        (2, 3),
        {"w": normal(0, 2, 3, 4), "b": normal(1, 2, 4)},
    ),
    Operation(
        "einsum",
        lambda ops, x, p: ops.einsum("...tkg,ngk->...gtn", x, p["w"]),
        (2, 3, 2),
        {"w": normal(0, 4, 2, 3)},
    ),
    Operation(
        "embedding",
        lambda ops, x, p: ops.embedding(jnp.argmax(u.get_mantissa(x), -1), p["w"]),
        (3,),
        {"w": MATRIX},
        u.siemens,
    ),
]
BY_NAME = {operation.name: operation for operation in OPERATIONS}


def markers(function, *arguments):
    """Names of the marked operations in a program."""
    return set(re.findall(r"\betp_\w+", str(jax.make_jaxpr(function)(*arguments))))


def assert_close(found, expected, tolerance=1e-5):
    """Equal trees, shapes and dtypes; numbers relative to the largest of each array."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        f, e = np.asarray(f), np.asarray(e)
        assert (f.shape, f.dtype) == (e.shape, e.dtype)
        np.testing.assert_allclose(f, e, rtol=0, atol=tolerance * max(1, np.abs(e).max(initial=0)))
