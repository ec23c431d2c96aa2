"""Models without an ETP operation learn online as their twins with marks do."""

import functools
import re
from dataclasses import dataclass

import brainstate
import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from assertions import assert_gradients_close
from backpropagation import through_time
from matrices import csr

import braintrace as bt

pytestmark = pytest.mark.usefixtures("float64")

BATCH, INPUTS, UNITS, STEPS = 2, 6, 4, 4
TOLERANCE = 1e-12
MASK = np.arange(INPUTS * UNITS).reshape(INPUTS, UNITS) % 3 > 0
LAYOUT = ("NCH", "OIH", "NCH")


@dataclass(frozen=True, eq=False)
class Row:
    """One step, written plainly and with marks.

    plain, marked: ``(params, h, x) -> h'``.
    shapes: of the parameters.
    exact: whether the gradient is that of backpropagation through time.
    """

    name: str
    plain: object
    marked: object
    shapes: dict
    exact: bool = True
    state: tuple = (UNITS,)

    def params(self):
        generator = np.random.default_rng(5)
        return {k: jnp.asarray(generator.standard_normal(s) / 2) for k, s in self.shapes.items()}

    def start(self):
        values = np.linspace(-0.4, 0.6, int(np.prod(self.state)))
        return jnp.asarray(np.tile(values.reshape(self.state), (BATCH, *[1] * len(self.state))))


ROWS = []


def row(name, plain, marked, exact=True, state=(UNITS,), **shapes):
    ROWS.append(Row(name, plain, marked, shapes, exact, state))


def leaky(h, drive):
    return 0.8 * h + jnp.tanh(drive)


def row_of_leaky(drive, marked, exact=True, **shapes):
    """Add a row whose drive feeds a leaky state."""
    name = shapes.pop("name")
    row(
        name,
        lambda p, h, x: leaky(h, drive(p, x)),
        lambda p, h, x: leaky(h, marked(p, x)),
        exact,
        **shapes,
    )


def selected(a, b, first, second):
    return jnp.where(first > 0, a, second) + jnp.logaddexp(jnp.broadcast_to(b, first.shape), second)


def rotated(a, x):
    return jnp.real(a * jnp.exp(1j * x[:, :UNITS])) + jnp.abs(a) * x[:, 2:]


DENSE = {"w": (INPUTS, UNITS), "b": (UNITS,)}
TALL = {"w": (UNITS, INPUTS), "b": (UNITS,)}
mm, ew = bt.matmul, bt.element_wise

row_of_leaky(lambda p, x: x @ p["w"], lambda p, x: mm(x, p["w"]), name="product", w=(INPUTS, UNITS))
row_of_leaky(
    lambda p, x: x @ p["w"] + p["b"], lambda p, x: mm(x, p["w"], p["b"]), name="bias", **DENSE
)
row_of_leaky(
    lambda p, x: p["b"] + x @ p["w"],
    lambda p, x: mm(x, p["w"], p["b"]),
    name="a bias in front",
    **DENSE,
)
row_of_leaky(
    lambda p, x: x @ p["w"] + p["c"],
    lambda p, x: mm(x, p["w"], jnp.broadcast_to(p["c"], UNITS)),
    name="one bias for all",
    w=(INPUTS, UNITS),
    c=(),
)
row_of_leaky(
    lambda p, x: x[:, :2] @ p["v"] + x @ p["w"] + p["b"],
    lambda p, x: mm(x[:, :2], p["v"]) + mm(x, p["w"]) + ew(p["b"]),
    name="a bias of two products",
    v=(2, UNITS),
    **DENSE,
)
row_of_leaky(
    lambda p, x: x @ p["w"].T + p["b"],
    lambda p, x: mm(x, p["w"].T, p["b"]),
    name="a transposed weight",
    **TALL,
)
row_of_leaky(
    lambda p, x: jax.lax.dot_general(x, p["w"], (((1,), (1,)), ((), ()))),
    lambda p, x: mm(x, p["w"].T),
    name="its second axis summed over",
    w=(UNITS, INPUTS),
)
row_of_leaky(
    lambda p, x: (p["w"] @ x.T + p["b"][:, None]).T,
    lambda p, x: mm(x, p["w"].T, p["b"]),
    name="a weight on the left",
    **TALL,
)
row_of_leaky(
    lambda p, x: jax.vmap(lambda x: p["w"] @ x + p["b"])(x),
    lambda p, x: mm(x, p["w"].T, p["b"]),
    name="mapped over samples",
    **TALL,
)
row_of_leaky(
    lambda p, x: jnp.einsum("bij,jio->bo", x.reshape(BATCH, 2, 3), p["w"]),
    lambda p, x: mm(
        x.reshape(BATCH, 2, 3).swapaxes(1, 2).reshape(BATCH, -1), p["w"].reshape(6, UNITS)
    ),
    name="two axes summed over",
    w=(3, 2, UNITS),
)
row_of_leaky(
    lambda p, x: (jnp.einsum("bi,ijk->bjk", x, p["w"]) + p["b"]).reshape(BATCH, -1),
    lambda p, x: mm(x, p["w"].reshape(INPUTS, -1), p["b"].reshape(-1)),
    name="a weight with two axes of its own",
    w=(INPUTS, 2, 2),
    b=(2, 2),
)
row_of_leaky(
    lambda p, x: (x.reshape(BATCH, 2, 3) @ p["w"] + p["b"]).reshape(BATCH, -1),
    lambda p, x: mm(x.reshape(BATCH, 2, 3), p["w"], p["b"]).reshape(BATCH, -1),
    name="two leading axes",
    w=(3, 2),
    b=(2,),
)
row_of_leaky(
    lambda p, x: x[:, :1] @ p["w"],
    lambda p, x: mm(x[:, :1], p["w"]),
    name="one input",
    w=(1, UNITS),
)
row_of_leaky(
    lambda p, x: jnp.einsum("bi,o->bo", x[:, :1], p["w"]),
    lambda p, x: x[:, :1] * ew(p["w"]),
    name="an outer product",
    w=(UNITS,),
    exact=True,
)
row_of_leaky(
    lambda p, x: jnp.einsum("bgh,g->bh", x[:, :, None] * jnp.ones(UNITS), p["w"]),
    lambda p, x: (x[:, :, None] * ew(p["w"])[:, None] * jnp.ones(UNITS)).sum(1),
    name="a weight without an axis of its own",
    w=(INPUTS,),
)
row_of_leaky(
    lambda p, x: jnp.einsum("bgh,hg->bh", (x @ p["v"]).reshape(BATCH, 2, UNITS), p["w"]),
    lambda p, x: (mm(x, p["v"]).reshape(BATCH, 2, UNITS) * ew(p["w"]).T).sum(1),
    name="a product behind it",
    v=(INPUTS, 2 * UNITS),
    w=(UNITS, 2),
)
row_of_leaky(
    lambda p, x: jnp.einsum("bgk,gkn->bgn", x.reshape(BATCH, 2, 3), p["w"]).reshape(BATCH, -1),
    lambda p, x: bt.grouped_matmul(x.reshape(BATCH, 2, 3), p["w"]).reshape(BATCH, -1),
    name="heads",
    w=(2, 3, 2),
)
row_of_leaky(
    lambda p, x: (jnp.einsum("gnk,bkg->bng", p["w"], x.reshape(BATCH, 3, 2)) + p["b"]).reshape(
        BATCH, -1
    ),
    lambda p, x: (
        bt.grouped_matmul(x.reshape(BATCH, 3, 2).swapaxes(1, 2), p["w"].swapaxes(1, 2), p["b"].T)
        .swapaxes(1, 2)
        .reshape(BATCH, -1)
    ),
    name="heads behind, with a bias",
    w=(2, 2, 3),
    b=(2, 2),
)
row_of_leaky(
    lambda p, x: x @ p["B"] @ p["A"] + p["A"] @ (p["B"].T @ x[0]) @ p["C"] + p["b"],
    lambda p, x: (
        bt.lora_matmul(x, p["B"], p["A"])
        + bt.matmul(bt.lora_matmul(x[0], p["B"], p["A"].T), p["C"])
        + ew(p["b"])
    ),
    name="a low rank",
    B=(INPUTS, UNITS),
    A=(UNITS, UNITS),
    C=(UNITS, UNITS),
    b=(UNITS,),
    exact=False,
)
row_of_leaky(
    lambda p, x: (
        (p["A"] @ jnp.einsum("bi,ikl->klb", x, p["B"]).reshape(4, BATCH)).T
        + jnp.einsum("klb,okl->bo", jnp.einsum("bi,ikl->klb", x, p["B"]), p["C"])
        + p["b"]
    ),
    lambda p, x: (
        bt.matmul(bt.matmul(x, p["B"].reshape(INPUTS, -1)), p["A"].T)
        + bt.lora_matmul(x, p["B"].reshape(INPUTS, -1), p["C"].reshape(UNITS, -1).T)
        + ew(p["b"])
    ),
    name="a low rank in axes",
    B=(INPUTS, 2, 2),
    A=(UNITS, 4),
    C=(UNITS, 2, 2),
    b=(UNITS,),
    exact=False,
)
row_of_leaky(
    lambda p, x: x @ p["B"] @ p["A"] + p["b"],
    lambda p, x: bt.lora_matmul(x, p["B"], p["A"], bias=p["b"]),
    name="a low rank with a bias",
    B=(INPUTS, 2),
    A=(2, UNITS),
    b=(UNITS,),
)
row_of_leaky(
    lambda p, x: x @ (jnp.abs(p["w"]) * MASK) / jnp.linalg.norm(p["w"]),
    lambda p, x: mm(x, jnp.abs(p["w"]) * MASK) / ew(p["w"], jnp.linalg.norm),
    name="a masked weight and its norm",
    w=(INPUTS, UNITS),
)
row_of_leaky(
    lambda p, x: x @ jnp.outer(p["a"], jnp.tanh(p["b"])),
    lambda p, x: mm(x, jnp.outer(p["a"], jnp.tanh(p["b"]))),
    name="a weight made of others",
    a=(INPUTS,),
    b=(UNITS,),
)
row_of_leaky(
    lambda p, x: rotated(jax.lax.complex(p["a"], p["b"]), x),
    lambda p, x: rotated(ew(jax.lax.complex(p["a"], p["b"])), x),
    name="a complex number and its absolute value",
    a=(UNITS,),
    b=(UNITS,),
)
row_of_leaky(
    lambda p, x: x[:, :UNITS] @ p["w"] + x[:, 2:] @ p["w"].T,
    lambda p, x: mm(x[:, :UNITS], p["w"]) + mm(x[:, 2:], p["w"].T),
    name="a tied weight",
    w=(UNITS, UNITS),
)
row(
    "a decay, and one minus it",
    lambda p, h, x: jax.nn.sigmoid(p["a"]) * h + (1 - jax.nn.sigmoid(p["a"])) * (x @ p["w"]),
    lambda p, h, x: (lambda d: d * h + (1 - d) * mm(x, p["w"]))(ew(p["a"], jax.nn.sigmoid)),
    a=(UNITS,),
    w=(INPUTS, UNITS),
)
row(
    "a time constant for all",
    lambda p, h, x: h + (x[:, :UNITS] - h) * jnp.exp(p["tau"]) * p["gain"],
    lambda p, h, x: h + (x[:, :UNITS] - h) * ew(p["tau"], jnp.exp) * ew(p["gain"]),
    tau=(),
    gain=(UNITS,),
)
row_of_leaky(
    lambda p, x: jax.nn.standardize(x)[:, :UNITS] * p["scale"] + p["offset"],
    lambda p, x: jax.nn.standardize(x)[:, :UNITS] * ew(p["scale"]) + ew(p["offset"]),
    name="scales of a layer norm",
    scale=(UNITS,),
    offset=(UNITS,),
)
row_of_leaky(
    lambda p, x: selected(p["a"], p["b"], x[:, :UNITS], x[:, 2:]),
    lambda p, x: selected(ew(p["a"]), ew(p["b"]), x[:, :UNITS], x[:, 2:]),
    name="selected, and in a function with a derivative of its own",
    a=(UNITS,),
    b=(UNITS,),
)
row_of_leaky(
    lambda p, x: jnp.concatenate([jnp.tile(p["a"], (BATCH, 1)), x[:, :2]], -1),
    lambda p, x: jnp.concatenate([jnp.tile(ew(p["a"]), (BATCH, 1)), x[:, :2]], -1),
    name="beside data",
    a=(2,),
)
row_of_leaky(
    lambda p, x: x[:, :UNITS] * p["w"].sum(0) + p["w"][0],
    lambda p, x: x[:, :UNITS] * ew(p["w"].sum(0)) + ew(p["w"][0]),
    name="two functions of a parameter that mix its entries",
    w=(3, UNITS),
)
row_of_leaky(
    lambda p, x: jax.lax.stop_gradient(p["b"]) * (x @ p["w"]),
    lambda p, x: jax.lax.stop_gradient(p["b"]) * mm(x, p["w"]),
    name="a parameter that is held",
    **DENSE,
)
row_of_leaky(
    lambda p, x: jax.jit(lambda w, x: jax.checkpoint(jnp.dot)(x, w))(p["w"], x) + p["b"],
    lambda p, x: mm(x, p["w"], p["b"]),
    name="inside calls",
    **DENSE,
)
row_of_leaky(
    lambda p, x: mm(x, p["w"]) + p["b"] * ew(p["c"]),
    lambda p, x: mm(x, p["w"]) + ew(p["b"]) * ew(p["c"]),
    name="beside marks that are there",
    c=(UNITS,),
    **DENSE,
)
row_of_leaky(
    lambda p, x: jax.lax.conv_general_dilated(
        x.reshape(BATCH, 2, 3), p["w"], (1,), "SAME", dimension_numbers=LAYOUT
    )[:, :, :2].reshape(BATCH, -1),
    lambda p, x: bt.conv(x.reshape(BATCH, 2, 3), p["w"], dimension_numbers=LAYOUT)[
        :, :, :2
    ].reshape(BATCH, -1),
    name="a convolution",
    w=(2, 2, 2),
)
row_of_leaky(
    lambda p, x: (
        jax.lax.conv_general_dilated(
            x.reshape(BATCH, 2, 3), p["w"], (2,), "SAME", feature_group_count=2,
            dimension_numbers=LAYOUT,
        ) + p["b"][:, None]
    ).reshape(BATCH, -1),
    lambda p, x: bt.conv(
        x.reshape(BATCH, 2, 3), p["w"], p["b"], strides=2, feature_group_count=2,
        dimension_numbers=LAYOUT,
    ).reshape(BATCH, -1),
    name="a convolution in groups with a bias",
    w=(2, 1, 2),
    b=(2,),
)  # fmt: skip


def first(x):
    return (10 * x[:, 0]).astype(int) % 3


def each_own(x):
    return (10 * x[:, :UNITS]).astype(int) % 3


@jax.custom_vjp
def hidden_product(x, w):
    return x @ w


hidden_product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, y: (y @ kept[1].T, kept[0].T @ y))


@jax.custom_jvp
def softened(x, b):
    return jnp.tanh(x - b)


@softened.defjvp
def _(primals, tangents):
    (x, b), (dx, db) = primals, tangents
    y = softened(x, b)
    return y, (1 - y**2) * (dx - db)


def rows_of(table, x, look):
    """Rows for all samples, and one for the first sample alone."""
    return look(table, first(x)) + look(table, first(x)[1])


row_of_leaky(
    lambda p, x: rows_of(p["w"], x, lambda w, i: w[i]),
    lambda p, x: rows_of(p["w"], x, lambda w, i: bt.embedding(i, w)),
    name="rows of a table",
    w=(3, UNITS),
)
row_of_leaky(
    lambda p, x: (
        jnp.take(p["w"], first(x) - 1, axis=1, mode="clip").T
        + jax.vmap(lambda i: p["v"][i])(first(x) - 2)
    ),
    lambda p, x: (
        bt.embedding(jnp.maximum(first(x) - 1, 0), p["w"].T)
        + bt.embedding((first(x) - 2) % 3, p["v"])
    ),
    name="columns of a table, and rows by a map",
    w=(UNITS, 3),
    v=(3, UNITS),
)
row(
    "a recurrent net",
    lambda p, h, x: jnp.tanh(jnp.concatenate([x, h], -1) @ p["w"] + p["b"]),
    lambda p, h, x: jnp.tanh(mm(jnp.concatenate([x, h], -1), p["w"], p["b"])),
    exact=False,
    w=(INPUTS + UNITS, UNITS),
    b=(UNITS,),
)


def gated(product, p, h, x):
    z, r = jnp.split(jax.nn.sigmoid(product(x, p["w"]) + product(h, p["u"])), 2, -1)
    new = jnp.tanh(product(x, p["v"]) + product(r * h, p["o"]))
    return (1 - z) * h + z * new


row(
    "a gate behind a weight",
    functools.partial(gated, jnp.matmul),
    functools.partial(gated, mm),
    exact=False,
    w=(INPUTS, 2 * UNITS),
    u=(UNITS, 2 * UNITS),
    v=(INPUTS, UNITS),
    o=(UNITS, UNITS),
)


def branches(p, h, x):
    drive = jax.lax.cond(x[0, 0] > 0, lambda: x @ p["w"], lambda: 0.5 * x[:, :UNITS])
    faster = x[0, 1] > 0
    return 0.8 * jax.lax.cond(faster, lambda a: jnp.tanh(a) * h, lambda a: a + h, p["a"]) + drive


def selections(p, h, x):
    a, drive = ew(p["a"]), jnp.where(x[0, 0] > 0, mm(x, p["w"]), 0.5 * x[:, :UNITS])
    return 0.8 * jnp.where(x[0, 1] > 0, jnp.tanh(a) * h, a + h) + drive


row("branches", branches, selections, w=(INPUTS, UNITS), a=(UNITS,))


def small_steps(product, mark, p, h, x):
    a = mark(p["a"])

    def step(h, _):
        return h + 0.2 * (product(x, p.get("w")) - a * h), None

    return jax.lax.scan(step, h, None, length=3)[0]


row(
    "small steps",
    functools.partial(small_steps, jnp.matmul, lambda a: a),
    functools.partial(small_steps, mm, ew),
    w=(INPUTS, UNITS),
    a=(UNITS,),
)
row(
    "small steps without a product",
    functools.partial(small_steps, lambda x, w: x[:, :UNITS], lambda a: a),
    functools.partial(small_steps, lambda x, w: x[:, :UNITS], ew),
    a=(UNITS,),
)


def gains(select, p, h, x):
    def step(h, a):
        return a * h + 0.1 * x[:, :UNITS], None

    return select(step, h, p["a"])


def by_hand(step, h, a):
    for k in range(len(a)):
        h, _ = step(h, ew(a[k]))
    return h


row(
    "small steps with parameters of their own",
    functools.partial(gains, lambda step, h, a: jax.lax.scan(step, h, a)[0]),
    functools.partial(gains, by_hand),
    a=(3, UNITS),
)


def while_it_changes(mark, p, h, x):
    a = mark(p["a"])

    def step(carried):
        count, h = carried
        return count + 1, h + 0.2 * (x[:, :UNITS] - a * h)

    return jax.lax.fori_loop(0, 3, lambda _, h: step((0, h))[1], h)


row(
    "a loop",
    functools.partial(while_it_changes, lambda a: a),
    functools.partial(while_it_changes, ew),
    a=(UNITS,),
)


def layers(product, p, h, x):
    def layer(below, given):
        w, b, h = given
        h = 0.8 * h + 0.3 * product(below, w, b)
        return h, h

    return jax.lax.scan(layer, x[:, :UNITS], (p["w"], p["b"], h.swapaxes(0, 1)))[1].swapaxes(0, 1)


row(
    "stacked layers",
    functools.partial(layers, lambda x, w, b: x @ w + b),
    functools.partial(layers, mm),
    exact=False,
    state=(2, UNITS),
    w=(2, UNITS, UNITS),
    b=(2, UNITS),
)
row_of_leaky(
    lambda p, x: u.get_mantissa(((x * u.mV) @ (p["w"] * u.mS) + p["b"] * u.nA) / u.uA),
    lambda p, x: u.get_mantissa(mm(x * u.mV, p["w"] * u.mS, p["b"] * u.nA) / u.uA),
    name="units",
    **DENSE,
)


ENTRIES = np.array([0, 3, 5, 5, 1, 2, 3]), np.array([2, 0, 1, 1, 3, 0, 0])
"""Rows and columns of a sparse matrix in no order; two places are taken twice."""
FEW = np.array([0, 3, 5, 5, 1]), np.array([2, 0, 1, 3, 0])


def added_up(p, x, rows=ENTRIES[0], columns=ENTRIES[1], **options):
    terms = x[:, rows] * p["w"]
    return jnp.zeros((len(x), UNITS)).at[:, columns].add(terms, **options)


def by_segments(p, x):
    terms = jax.vmap(lambda x: x[ENTRIES[0]] * p["w"])(x)
    return jax.ops.segment_sum(terms.T, ENTRIES[1], UNITS).T


def terms_marked(p, function=lambda w: w):
    return {**p, "w": ew(p["w"], function)}


row_of_leaky(added_up, lambda p, x: added_up(terms_marked(p), x), name="a sparse matrix", w=(7,))
row_of_leaky(
    lambda p, x: by_segments(p, x) + p["b"],
    lambda p, x: by_segments(terms_marked(p), x) + ew(p["b"]),
    name="a sparse matrix by segments, with a bias",
    w=(7,),
    b=(UNITS,),
)
row_of_leaky(
    lambda p, x: jax.vmap(lambda x: added_up(p, x[None])[0], 1, 1)(x.T).T,
    lambda p, x: added_up(terms_marked(p), x),
    name="a sparse matrix of samples behind each other",
    w=(7,),
)
row_of_leaky(
    lambda p, x: added_up({"w": jnp.exp(p["w"])}, x, columns=np.minimum(ENTRIES[1] * 2, 4)),
    lambda p, x: added_up(terms_marked(p, jnp.exp), x, columns=np.minimum(ENTRIES[1] * 2, 4)),
    name="a sparse matrix with entries that are left out",
    w=(7,),
)
row_of_leaky(
    lambda p, x: 2 * (x @ p["w"]) + p["b"],
    lambda p, x: 2 * mm(x, p["w"]) + ew(p["b"]),
    name="a bias of twice a product",
    **DENSE,
)
row_of_leaky(
    lambda p, x: p["w"][each_own(x), jnp.arange(UNITS)],
    lambda p, x: bt.embedding(each_own(x) * UNITS + jnp.arange(UNITS), p["w"].ravel()),
    name="entries at two indices",
    w=(3, UNITS),
)
row_of_leaky(
    lambda p, x: jnp.take(p["w"], first(x) + 1, 0, mode="fill", fill_value=0.5) + p["v"][2:][1],
    lambda p, x: (
        jnp.where(first(x)[:, None] < 2, bt.embedding((first(x) + 1) % 3, p["w"]), 0.5)
        + ew(p["v"][3])
    ),
    name="rows that are not there",
    w=(3, UNITS),
    v=(4, UNITS),
)
row_of_leaky(
    lambda p, x: jax.lax.dynamic_slice(p["w"], (0, first(x)[1]), (UNITS, 2))[:, 1] * x[:, 2:],
    lambda p, x: bt.embedding(jnp.minimum(first(x)[1], 1) + jnp.arange(2), p["w"].T)[1] * x[:, 2:],
    name="a window of columns",
    w=(UNITS, 3),
)
row_of_leaky(
    lambda p, x: jax.nn.sigmoid(x @ p["g"] + p["c"])[:, None] * x[:, 2:] + p["a"][first(x), None],
    lambda p, x: (
        jax.nn.sigmoid(mm(x, p["g"][:, None], p["c"][None])) * x[:, 2:]
        + bt.embedding(first(x), p["a"])[:, None]
    ),
    name="one gate for all units",
    g=(INPUTS,),
    c=(),
    a=(3,),
)
row_of_leaky(
    lambda p, x: hidden_product(x, p["w"]) + p["b"],
    lambda p, x: mm(x, p["w"]) + ew(p["b"]),
    name="a custom backward rule",
    **DENSE,
)
row_of_leaky(
    lambda p, x: softened(x[:, :UNITS], p["b"]),
    lambda p, x: jnp.tanh(x[:, :UNITS] + ew(jnp.tile(-p["b"], (BATCH, 1)))),
    name="a forward rule that broadcasts",
    b=(UNITS,),
)
row_of_leaky(
    lambda p, x: (jnp.zeros((UNITS, INPUTS)).at[FEW[1], FEW[0]].set(p["w"]) @ x.T).T + p["b"],
    lambda p, x: mm(x, jnp.zeros((INPUTS, UNITS)).at[FEW].set(p["w"]), p["b"]),
    name="few entries in a matrix",
    w=(5,),
    b=(UNITS,),
)


class Model(brainstate.nn.Module):
    """Several steps side by side, each in front of a readout of its own."""

    def __init__(self, rows, kind):
        super().__init__()
        self.rows, self.kind = rows, kind
        for k, each in enumerate(rows):
            for name, value in each.params().items():
                setattr(self, f"{name}{k}", brainstate.ParamState(value))

    def init_state(self, batch_size=None, **_):
        for k, each in enumerate(self.rows):
            start = each.start()
            setattr(self, f"h{k}", brainstate.HiddenState(start if batch_size else start[0]))

    def update(self, x):
        outputs = []
        for k, each in enumerate(self.rows):
            params = {name: getattr(self, f"{name}{k}").value for name in each.shapes}
            state = getattr(self, f"h{k}")
            state.value = getattr(each, self.kind)(params, state.value, x)
            outputs.append(state.value)
        return outputs


def data():
    generator = np.random.default_rng(7)
    return generator.standard_normal((STEPS, BATCH, INPUTS))


def loss_of(outputs):
    return sum((output**2).sum() for output in outputs)


def compiled(rows, kind, algorithm="d_rtrl", **options):
    options = {"batch_size": BATCH, **options}
    return bt.compile(Model(rows, kind), algorithm, data()[0], **options)


def gradients_of(learner):
    step_fn = lambda x: loss_of(learner(x))  # noqa: E731
    gradients = learner.etrace_grad(data(), step_fn=step_fn, reduction="sum")
    return {path[0]: np.asarray(value) for path, value in gradients.items()}


def bptt(rows):
    def step(params, states, x):
        states = [r.plain(p, h, x) for r, p, h in zip(rows, params, states, strict=True)]
        return states, loss_of(states)

    starts = [row.start() for row in rows]
    found = through_time(step, [row.params() for row in rows], starts, data())
    return {f"{name}{k}": v for k, params in enumerate(found) for name, v in params.items()}


def relations_of(learner):
    return sorted(
        (
            relation.primitive.name,
            relation.parameter_paths,
            str(relation.x_var and relation.x_var.aval.shape),
            str(relation.y_var.aval),
            [state.name for group in relation.hidden_groups for state in group.states],
            [influence.kind for influence in relation.influences],
        )
        for relation in learner.graph.hidden_param_op_relations
    )


def findings_of(learner):
    return {(d.kind, d.paths) for d in learner.graph.diagnostics}


FIRST = {
    "product",
    "its second axis summed over",
    "one input",
    "a low rank with a bias",
    "a time constant for all",
    "inside calls",
    "branches",
    "a sparse matrix",
    "a bias of twice a product",
    "a custom backward rule",
}
"""The first rows of groups of exact ones, each of which is compiled together."""


def groups():
    found = []
    for each in (row for row in ROWS if row.exact):
        found = [*found, (each,)] if each.name in FIRST else [*found[:-1], (*found[-1], each)]
    return [*found, tuple(each for each in ROWS if not each.exact)]


GROUPS = groups()


def each(groups):
    return [pytest.param(rows, id=rows[0].name) for rows in groups]


@functools.cache
def twins(rows):
    """The learners of the steps with marks by hand, and without any."""
    return compiled(rows, "marked"), compiled(rows, "plain", mark="auto")


@pytest.mark.rows(
    "product",
    "its second axis summed over",
    "a low rank with a bias",
    "inside calls",
    "a sparse matrix",
    "a custom backward rule",
)
@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
@pytest.mark.parametrize("rows", each(GROUPS))
def test_has_the_relations_of_its_marked_twin(rows):
    twin, learner = twins(rows)
    assert relations_of(learner) == relations_of(twin)
    assert findings_of(learner) == findings_of(twin)


@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
@pytest.mark.rows("product", "a low rank with a bias", "a custom backward rule")
@pytest.mark.parametrize("rows", each(GROUPS))
def test_learns_as_its_marked_twin(rows):
    twin, learner = twins(rows)
    wanted = bptt(rows) if all(row.exact for row in rows) else gradients_of(twin)
    assert_gradients_close(gradients_of(learner), wanted, TOLERANCE)


@pytest.mark.parametrize("algorithm", ["es_d_rtrl", "rtrl"])
def test_other_rules_learn_as_by_hand(algorithm):
    rows = tuple(r for r in ROWS if r.name in ("bias", "small steps", "a decay, and one minus it"))
    wanted = gradients_of(compiled(rows, "marked", algorithm))
    found = gradients_of(compiled(rows, "plain", algorithm, mark="auto"))
    assert_gradients_close(found, wanted, TOLERANCE)


def test_a_model_of_one_sample_is_mapped():
    names = "a transposed weight", "a decay, and one minus it", "a sparse matrix"
    rows = tuple(r for r in ROWS if r.name in names)
    xs = data()

    def gradients(kind, **options):
        model = OneSample(rows, kind)
        learner = bt.compile(model, "d_rtrl", xs[0], vmap=True, **options)
        return relations_of(learner), gradients_of(learner)

    (wanted, twin), (found, own) = gradients("marked"), gradients("plain", mark="auto")
    assert found == wanted
    assert_gradients_close(own, twin, TOLERANCE)


class OneSample(Model):
    """The same steps, written for one sample."""

    def init_state(self, **_):
        super().init_state(None)

    def update(self, x):
        outputs = []
        for k, each in enumerate(self.rows):
            params = {name: getattr(self, f"{name}{k}").value for name in each.shapes}
            state = getattr(self, f"h{k}")
            state.value = getattr(each, self.kind)(params, state.value[None], x[None])[0]
            outputs.append(state.value)
        return outputs


@jax.custom_vjp
def clipped_product(x, w):
    return x @ w


clipped_product.defvjp(
    lambda x, w: (x @ w, x), lambda x, y: (jnp.zeros_like(x), jnp.clip(x.T @ y, -1, 1))
)


def many_gains(p, h, x):
    gains = jnp.tile(p["w"][:, :UNITS], (7, 1))
    return jax.lax.scan(lambda h, a: (a * h, None), h, gains)[0] + 0.1 * x[:, :UNITS]


def long_loop(p, h, x):
    return jax.lax.scan(lambda h, _: (h + 0.01 * (x @ p["w"] - h), None), h, None, length=40)[0]


def by_callback(p, h, x):
    shape = jax.ShapeDtypeStruct((BATCH, UNITS), h.dtype)
    return leaky(h, jax.pure_callback(lambda x, w: np.asarray(x @ w), shape, x, p["w"]))


def with_precision(p, h, x):
    return leaky(h, jnp.dot(x, p["w"], precision="highest"))


def shared_terms(p, h, x):
    terms = x[:, ENTRIES[0]] * p["w"]
    return leaky(h, jnp.zeros((BATCH, UNITS)).at[:, ENTRIES[1]].add(terms) + terms[:, :UNITS])


def columns_from_data(p, h, x):
    columns = jnp.argsort(x[0, jnp.arange(7) % INPUTS]) % UNITS
    return leaky(h, added_up(p, x, columns=columns))


def rows_that_clip(p, h, x):
    terms = jnp.take(x, ENTRIES[0] + 2, axis=1, mode="clip") * p["w"]
    return leaky(h, jnp.zeros((BATCH, UNITS)).at[:, ENTRIES[1]].add(terms))


@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
def test_a_sum_at_columns_that_data_choose_is_reported():
    def with_bias(p, h, x):
        return columns_from_data(p, h, x) + p["c"]

    row = Row("columns_from_data", with_bias, None, {"w": (7,), "c": (UNITS,)})
    learner = compiled((row,), "plain", mark="auto")
    assert ("mixed-positions", ("w0", "h0")) in findings_of(learner)


@pytest.mark.parametrize("step", [shared_terms, rows_that_clip])
def test_a_sum_that_is_no_sparse_product_learns_term_by_term(step):
    """Each term reaches one place, so that its weight is one of an elementwise operation."""

    def with_bias(p, h, x):
        return step(p, h, x) + p["c"]

    rows = (Row(step.__name__, with_bias, None, {"w": (7,), "c": (UNITS,)}),)
    learner = compiled(rows, "plain", mark="auto")
    assert not findings_of(learner)
    assert_gradients_close(gradients_of(learner), bptt(rows), TOLERANCE)


UNMARKED = {
    "a backward rule that clips": (
        lambda p, h, x: h + clipped_product(x, p["w"]),
        "custom_vjp.*not proportional",
    ),
    "a long loop": (long_loop, "unroll_limit"),
    "a long loop over parameters": (many_gains, "unroll_limit"),
    "a callback": (by_callback, "pure_callback.*cannot follow single elements"),
    "a precision": (with_precision, "precision"),
}


@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
@pytest.mark.parametrize("name", UNMARKED)
def test_what_stays_unmarked_is_reported_and_has_the_gradient_of_the_step(name):
    step, words = UNMARKED[name]

    def with_mark(p, h, x):
        return step(p, h, x) + ew(p["c"]) * x[:, :UNITS]

    def without(p, h, x):
        return step(p, h, x) + p["c"] * x[:, :UNITS]

    rows = (Row(name, without, with_mark, {"w": (INPUTS, UNITS), "c": (UNITS,)}),)
    learner = compiled(rows, "plain", mark="auto")
    (found,) = [d for d in learner.graph.diagnostics if d.kind == "not-marked"]
    assert found.paths == ("w0",)
    assert re.search(words, found.message)
    assert "not-marked" in str(learner.report())
    if name != "a callback":
        wanted = gradients_of(compiled(rows, "marked"))
        assert_gradients_close(gradients_of(learner), wanted, TOLERANCE)


BY_ROW = csr(jnp.asarray(MASK, float))
BY_UNIT = csr(jnp.asarray(MASK.T, float))
PLACES = np.argwhere(MASK.T).astype(np.int32)
ROW, COLUMN, PAIRS = map(jax.device_put, (*PLACES.T, PLACES))
COUNT = int(MASK.sum())


def stored(p, matrix):
    return type(matrix)((p["w"], matrix.indices, matrix.indptr), shape=matrix.shape)


def listed(p):
    return u.sparse.COO((p["w"], ROW, COLUMN), shape=MASK.T.shape)


def noise(x):
    return jax.lax.stop_gradient(jnp.sin(x[0])) * np.ones((UNITS, 1))


def convolved(p, x):
    kernel = p["w"] + jax.lax.stop_gradient(x[0, 0])
    return jax.lax.conv_general_dilated(x[:, None, :UNITS], kernel, (1,), "SAME")[:, 0]


SPARSE, LOOKED, SHIFTED = "`braintrace.sparse_matmul`", "`braintrace.embedding`", "`conv`"
OTHER_FORMS = {
    "a stored matrix": (lambda p, x: x @ stored(p, BY_ROW), SPARSE, (COUNT,)),
    "a stored matrix in front": (lambda p, x: (stored(p, BY_UNIT) @ x.T).T, SPARSE, (COUNT,)),
    "a matrix with a list of places": (lambda p, x: (listed(p) @ x.T).T, SPARSE, (COUNT,)),
    "a matrix with indices": (
        lambda p, x: (jax.experimental.sparse.BCOO((p["w"], PAIRS), shape=MASK.T.shape) @ x.T).T,
        SPARSE,
        (COUNT,),
    ),
    "an entry of each row": (
        lambda p, x: jnp.take_along_axis(p["w"][None], each_own(x)[..., None], 2)[..., 0],
        LOOKED,
        (UNITS, 3),
    ),
    "an entry of each row by a map": (
        lambda p, x: jax.vmap(lambda w, i: w[i], (0, 1), 1)(p["w"], each_own(x)),
        LOOKED,
        (UNITS, 3),
    ),
    "noise in a weight": (
        lambda p, x: x @ (noise(x) - p["w"]).T,
        "`braintrace.matmul`",
        (UNITS, INPUTS),
    ),
    "noise in a kernel": (convolved, SHIFTED, (1, 1, 3)),
}


def gradients_without_a_mark(row):
    """In plain JAX, of the losses of single steps from states that are held, and of the sequence.

    The first is that of the parameter without a mark, the second that of the one with it.
    """

    def step(params, states, x):
        alone = row.plain(params["alone"], jax.lax.stop_gradient(states[0]), x)
        whole = row.plain(params["whole"], states[1], x)
        return (alone, whole), loss_of((alone, whole))

    params = dict.fromkeys(("alone", "whole"), row.params())
    found = through_time(step, params, (row.start(), row.start()), data())
    return {"w0": found["alone"]["w"], "c0": found["whole"]["c"]}


@pytest.mark.parametrize(
    "name",
    [
        "a matrix with a list of places",
        "a matrix with indices",
        "an entry of each row",
        "noise in a kernel",
    ],
)
@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
def test_a_form_without_a_mark_has_the_gradient_of_the_step_and_names_an_operation(name):
    drive, operation, shape = OTHER_FORMS[name]

    def plain(p, h, x):
        return leaky(h, drive(p, x))

    def with_gain(p, h, x):
        return plain(p, h, x) + p["c"] * x[:, :UNITS]

    row = Row(name, with_gain, None, {"w": shape, "c": (UNITS,)})
    learner = compiled((row,), "plain", mark="auto")
    (found,) = learner.graph.diagnostics
    assert (found.level, found.kind, found.paths) == ("warning", "not-marked", ("w0",))
    assert operation in found.message
    assert "test_marks.py" in found.source
    expected = gradients_without_a_mark(row)
    assert np.abs(expected["w0"]).max() > 0.1
    assert_gradients_close(gradients_of(learner), expected, TOLERANCE)
    with pytest.raises(bt.CompilationError, match=f"(?s)'w0' enters.*{operation}.*test_marks.py"):
        compiled((Row(name, plain, None, {"w": shape}),), "plain", mark="auto")


def test_a_filter_says_which_parameters_are_marked():
    rows = tuple(r for r in ROWS if r.name in ("bias", "a tied weight"))

    def marked(mark):
        graph = bt.compile_etrace_graph(started(Model(rows, "plain")), data()[0], mark=mark)
        return {p for r in graph.hidden_param_op_relations for p in r.parameter_paths}

    assert marked("w0") == {("w0",)}
    assert marked(("b0",)) == {("b0",)}
    assert marked(lambda path: path[0].startswith("w")) == {("w0",), ("w1",)}
    assert marked("auto") == {("w0",), ("b0",), ("w1",)}
    with pytest.raises(bt.OptionError, match=r"`mark` is 'v', which matches no parameter.*'w0'"):
        marked("v")
    with pytest.raises(bt.OptionError, match=r"`mark` is True; expected 'explicit', 'auto' or"):
        bt.D_RTRL(Model(rows, "plain"), mark=True)


def started(model):
    model.init_state(BATCH)
    return model


def test_a_model_without_marks_is_told_of_the_option():
    rows = tuple(r for r in ROWS if r.name == "bias")
    with pytest.raises(bt.CompilationError, match=r"No ETP operation(.|\n)*mark='auto'"):
        compiled(rows, "plain", mark="explicit")
    with pytest.raises(bt.CompilationError) as raised:
        compiled((Row("held", lambda p, h, x: 0.8 * h, None, {"w": (2,)}),), "plain", mark="auto")
    assert "mark='auto'" not in str(raised.value)
