"""Models without an ETP operation learn online as their twins with marks do."""

import functools
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
    lambda p, x: x @ p["w"] + p["b"], lambda p, x: mm(x, p["w"]) + ew(p["b"]), name="bias", **DENSE
)
row_of_leaky(
    lambda p, x: (p["w"] @ x.T + p["b"][:, None]).T,
    lambda p, x: mm(x, p["w"].T) + ew(p["b"]),
    name="a weight on the left",
    **TALL,
)
row_of_leaky(
    lambda p, x: jax.vmap(lambda x: p["w"] @ x + p["b"])(x),
    lambda p, x: mm(x, p["w"].T) + ew(p["b"]),
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
    lambda p, x: mm(x, p["w"].reshape(INPUTS, -1)) + ew(p["b"]).reshape(-1),
    name="a weight with two axes of its own",
    w=(INPUTS, 2, 2),
    b=(2, 2),
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
        bt.grouped_matmul(x.reshape(BATCH, 3, 2).swapaxes(1, 2), p["w"].swapaxes(1, 2)).swapaxes(
            1, 2
        )
        + ew(p["b"])
    ).reshape(BATCH, -1),
    name="heads behind, with a bias",
    w=(2, 2, 3),
    b=(2, 2),
)
row_of_leaky(
    lambda p, x: x @ (jnp.abs(p["w"]) * MASK) / jnp.linalg.norm(p["w"]),
    lambda p, x: mm(x, jnp.abs(p["w"]) * MASK) / ew(p["w"], jnp.linalg.norm),
    name="a masked weight and its norm",
    w=(INPUTS, UNITS),
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
    lambda p, x: jax.jit(lambda w, x: jax.checkpoint(jnp.dot)(x, w))(p["w"], x) + p["b"],
    lambda p, x: mm(x, p["w"]) + ew(p["b"]),
    name="inside calls",
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
        x.reshape(BATCH, 2, 3), p["w"], strides=2, feature_group_count=2,
        dimension_numbers=LAYOUT,
    ).reshape(BATCH, -1) + ew(p["b"])[:, None].repeat(2, 1).reshape(-1),
    name="a convolution in groups with a bias",
    w=(2, 1, 2),
    b=(2,),
)  # fmt: skip


def each_own(x):
    return (10 * x[:, :UNITS]).astype(int) % 3


row(
    "a recurrent net",
    lambda p, h, x: jnp.tanh(jnp.concatenate([x, h], -1) @ p["w"] + p["b"]),
    lambda p, h, x: jnp.tanh(mm(jnp.concatenate([x, h], -1), p["w"]) + ew(p["b"])),
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
    functools.partial(layers, lambda x, w, b: mm(x, w) + ew(b)),
    exact=False,
    state=(2, UNITS),
    w=(2, UNITS, UNITS),
    b=(2, UNITS),
)
row_of_leaky(
    lambda p, x: u.get_mantissa(((x * u.mV) @ (p["w"] * u.mS) + p["b"] * u.nA) / u.uA),
    lambda p, x: u.get_mantissa((mm(x * u.mV, p["w"] * u.mS) + ew(p["b"] * u.nA)) / u.uA),
    name="units",
    **DENSE,
)


ENTRIES = np.array([0, 3, 5, 5, 1, 2, 3]), np.array([2, 0, 1, 1, 3, 0, 0])
"""Rows and columns of a sparse matrix in no order; two places are taken twice."""


def added_up(p, x, rows=ENTRIES[0], columns=ENTRIES[1], **options):
    terms = x[:, rows] * p["w"]
    return jnp.zeros((len(x), UNITS)).at[:, columns].add(terms, **options)


def terms_marked(p, function=lambda w: w):
    return {**p, "w": ew(p["w"], function)}


row_of_leaky(added_up, lambda p, x: added_up(terms_marked(p), x), name="a sparse matrix", w=(7,))
row_of_leaky(
    lambda p, x: jax.nn.sigmoid(x @ p["g"] + p["c"])[:, None] * x[:, 2:],
    lambda p, x: jax.nn.sigmoid(mm(x, p["g"][:, None]) + ew(p["c"])) * x[:, 2:],
    name="one gate for all units",
    g=(INPUTS,),
    c=(),
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


EXACT = [row for row in ROWS if row.exact]
GROUPS = [*(tuple(EXACT[k::3]) for k in range(3)), tuple(row for row in ROWS if not row.exact)]


@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
@pytest.mark.parametrize("rows", GROUPS, ids=["exact 1", "exact 2", "exact 3", "truncated"])
def test_has_the_relations_of_its_marked_twin_and_its_gradient(rows):
    twin, learner = compiled(rows, "marked"), compiled(rows, "plain", mark="auto")
    assert relations_of(learner) == relations_of(twin)
    assert findings_of(learner) == findings_of(twin)
    wanted = bptt(rows) if rows[0].exact else gradients_of(twin)
    assert_gradients_close(gradients_of(learner), wanted, TOLERANCE)


@pytest.mark.parametrize("algorithm", ["es_d_rtrl", "rtrl"])
def test_other_rules_learn_as_by_hand(algorithm):
    rows = tuple(r for r in ROWS if r.name in ("bias", "small steps", "a decay, and one minus it"))
    wanted = gradients_of(compiled(rows, "marked", algorithm))
    found = gradients_of(compiled(rows, "plain", algorithm, mark="auto"))
    assert_gradients_close(found, wanted, TOLERANCE)


def test_a_model_of_one_sample_is_mapped():
    names = "a weight on the left", "a decay, and one minus it", "a sparse matrix"
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


MATRIX, ENTRIES_OF_MATRIX = csr(jnp.asarray(MASK, float)), (int(MASK.sum()),)


def stored(p, h, x):
    matrix = type(MATRIX)((p["w"], MATRIX.indices, MATRIX.indptr), shape=MATRIX.shape)
    return leaky(h, x @ matrix)


def listed(p, h, x):
    matrix = jax.experimental.sparse.BCOO((p["w"], np.argwhere(MASK.T)), shape=MASK.T.shape)
    return leaky(h, (matrix @ x.T).T)


def looked_up(p, h, x):
    return leaky(h, p["w"][(10 * x[:, 0]).astype(int) % 3])


@jax.custom_jvp
def softened(x, w):
    return jnp.tanh(x @ w)


softened.defjvp(lambda primals, tangents: jax.jvp(lambda x, w: jnp.tanh(x @ w), primals, tangents))


UNMARKED = {
    "a backward rule that clips": (
        lambda p, h, x: h + clipped_product(x, p["w"]),
        "derivative rule of its own",
    ),
    "a forward rule": (lambda p, h, x: leaky(h, softened(x, p["w"])), "rule of its own"),
    "a long loop": (long_loop, "unroll_limit"),
    "a long loop over parameters": (many_gains, "unroll_limit"),
    "a callback": (by_callback, "cannot follow single elements"),
    "a precision": (with_precision, "precision"),
    "a lookup": (looked_up, "`braintrace.embedding`", (3, UNITS)),
    "a stored matrix": (stored, "`braintrace.sparse_matmul`", ENTRIES_OF_MATRIX),
    "a matrix with indices": (listed, "`braintrace.sparse_matmul`", ENTRIES_OF_MATRIX),
}


@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
@pytest.mark.parametrize("name", UNMARKED)
def test_what_stays_unmarked_is_reported_and_has_the_gradient_of_the_step(name):
    step, words, shape = (*UNMARKED[name], (INPUTS, UNITS))[:3]

    def with_mark(p, h, x):
        return step(p, h, x) + ew(p["c"]) * x[:, :UNITS]

    def without(p, h, x):
        return step(p, h, x) + p["c"] * x[:, :UNITS]

    rows = (Row(name, without, with_mark, {"w": shape, "c": (UNITS,)}),)
    learner = compiled(rows, "plain", mark="auto")
    (found,) = [d for d in learner.graph.diagnostics if d.kind == "not-marked"]
    assert (found.level, found.paths) == ("warning", ("w0",))
    assert words in found.message
    assert "test_marks.py" in found.source
    if name != "a callback":  # which has no reverse mode
        wanted = gradients_of(compiled(rows, "marked"))
        assert_gradients_close(gradients_of(learner), wanted, TOLERANCE)


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
