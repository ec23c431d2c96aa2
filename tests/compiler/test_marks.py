"""A model in plain JAX learns as its twin in which a user has called the operations."""

import dataclasses
import functools
from collections.abc import Callable

import brainstate
import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import saiunit as u
from random_models import BATCH, INPUTS, UNITS
from toys import XS, Toy, bptt, compiled, findings, gradient, warned

import braintrace

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning"),
]
mm, ew = braintrace.matmul, braintrace.element_wise


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One step, written plainly and with marks: (params, h, x) -> h'."""

    name: str
    plain: Callable
    marked: Callable
    shapes: dict
    is_exact: bool = True


ROWS: list[Row] = []


def row(name, plain, marked, is_exact=True, **shapes):
    ROWS.append(Row(name, plain, marked, shapes, is_exact))


def drive(name, plain, marked, **shapes):
    """Add a row whose drive, of parameters and input, feeds a leaky state."""

    def leaky(drive):
        return lambda p, h, x: 0.8 * h + jnp.tanh(drive(p, x))

    row(name, leaky(plain), leaky(marked), **shapes)


# --- products -------------------------------------------------------------------------------------

DENSE = {"w": (INPUTS, UNITS), "b": (UNITS,)}
TALL = {"w": (UNITS, INPUTS), "b": (UNITS,)}

drive("product", lambda p, x: x @ p["w"] + p["b"], lambda p, x: mm(x, p["w"]) + ew(p["b"]), **DENSE)
drive(
    "weight on the left",
    lambda p, x: (p["w"] @ x.T + p["b"][:, None]).T,
    lambda p, x: mm(x, p["w"].T) + ew(p["b"]),
    **TALL,
)
drive(
    "mapped over samples",
    lambda p, x: jax.vmap(lambda x: p["w"] @ x + p["b"])(x),
    lambda p, x: mm(x, p["w"].T) + ew(p["b"]),
    **TALL,
)
drive(
    "inside calls",
    lambda p, x: jax.jit(lambda w, x: jax.checkpoint(jnp.dot)(x, w))(p["w"], x) + p["b"],
    lambda p, x: mm(x, p["w"]) + ew(p["b"]),
    **DENSE,
)
drive(
    "two axes of its own",
    lambda p, x: jnp.einsum("bi,ijk->bjk", x, p["w"]).reshape(BATCH, -1),
    lambda p, x: mm(x, p["w"].reshape(INPUTS, -1)),
    w=(INPUTS, 2, 2),
)
drive(
    "heads",
    lambda p, x: jnp.einsum("bg,gn->bgn", x[:, :2], p["w"]).reshape(BATCH, -1),
    lambda p, x: (x[:, :2, None] * ew(p["w"])).reshape(BATCH, -1),
    w=(2, 2),
)
drive(
    "groups",
    lambda p, x: jnp.einsum("bgk,gkn->bgn", pairs(x), p["w"]).reshape(BATCH, -1),
    lambda p, x: braintrace.grouped_matmul(pairs(x), p["w"]).reshape(BATCH, -1),
    w=(2, 2, 2),
)
drive(
    "masked and normalised",
    lambda p, x: x @ (jnp.abs(p["w"]) * MASK) / jnp.linalg.norm(p["w"]),
    lambda p, x: mm(x, jnp.abs(p["w"]) * MASK) / ew(p["w"], jnp.linalg.norm),
    w=(INPUTS, UNITS),
)
drive(
    "tied",
    lambda p, x: wide(x) @ p["w"] + wide(x)[:, ::-1] @ p["w"].T,
    lambda p, x: mm(wide(x), p["w"]) + mm(wide(x)[:, ::-1], p["w"].T),
    w=(UNITS, UNITS),
)
drive(
    "convolution with a bias",
    lambda p, x: (convolved(x, p["w"]) + p["b"][:, None]).reshape(BATCH, -1),
    lambda p, x: (
        braintrace.conv(x[:, None], p["w"], padding="VALID", dimension_numbers=LAYOUT)
        + ew(p["b"])[:, None]
    ).reshape(BATCH, -1),
    w=(2, 1, 2),
    b=(2,),
)
drive(
    "physical units",
    lambda p, x: u.get_mantissa(((x * u.mV) @ (p["w"] * u.mS) + p["b"] * u.nA) / u.uA),
    lambda p, x: u.get_mantissa((mm(x * u.mV, p["w"] * u.mS) + ew(p["b"] * u.nA)) / u.uA),
    **DENSE,
)

MASK = np.arange(INPUTS * UNITS).reshape(INPUTS, UNITS) % 3 > 0
LAYOUT = ("NCH", "OIH", "NCH")


def pairs(x):
    return jnp.stack([x[:, 1:], x[:, :-1]], 1)


def convolved(x, kernel):
    return jax.lax.conv_general_dilated(x[:, None], kernel, (1,), "VALID", dimension_numbers=LAYOUT)


# --- elements -------------------------------------------------------------------------------------


def wide(x):
    return jnp.concatenate([x, x[:, :1] ** 2], -1)


row(
    "a decay, and one minus it",
    lambda p, h, x: jax.nn.sigmoid(p["a"]) * h + (1 - jax.nn.sigmoid(p["a"])) * (x @ p["w"]),
    lambda p, h, x: (lambda d: d * h + (1 - d) * mm(x, p["w"]))(ew(p["a"], jax.nn.sigmoid)),
    a=(UNITS,),
    w=(INPUTS, UNITS),
)
drive(
    "scales of a layer norm",
    lambda p, x: jax.nn.standardize(wide(x)) * p["a"] + p["b"],
    lambda p, x: jax.nn.standardize(wide(x)) * ew(p["a"]) + ew(p["b"]),
    a=(UNITS,),
    b=(UNITS,),
)
drive(
    "selected",
    lambda p, x: jnp.where(wide(x) > 0, p["a"], jnp.logaddexp(wide(x), p["b"] + 0 * wide(x))),
    lambda p, x: jnp.where(
        wide(x) > 0, ew(p["a"]), jnp.logaddexp(wide(x), ew(p["b"]) + 0 * wide(x))
    ),
    a=(UNITS,),
    b=(UNITS,),
)
drive(
    "complex numbers",
    lambda p, x: jnp.real(jax.lax.complex(p["a"], p["b"]) * jnp.exp(1j * wide(x))),
    lambda p, x: jnp.real(ew(jax.lax.complex(p["a"], p["b"])) * jnp.exp(1j * wide(x))),
    a=(UNITS,),
    b=(UNITS,),
)
drive(
    "one gate for all units",
    lambda p, x: jax.nn.sigmoid(x @ p["g"] + p["c"])[:, None] * wide(x),
    lambda p, x: jax.nn.sigmoid(mm(x, p["g"][:, None]) + ew(p["c"])) * wide(x),
    g=(INPUTS,),
    c=(),
)

# --- loops, branches, recurrence ------------------------------------------------------------------


def small_steps(product, mark, p, h, x):
    a = mark(p["a"])

    def step(h, _):
        return h + 0.2 * (product(x, p["w"]) - a * h), None

    return jax.lax.scan(step, h, None, length=3)[0]


row(
    "small steps",
    functools.partial(small_steps, jnp.matmul, lambda a: a),
    functools.partial(small_steps, mm, ew),
    w=(INPUTS, UNITS),
    a=(UNITS,),
)
row(
    "branches",
    lambda p, h, x: 0.8 * h + jax.lax.cond(x[0, 0] > 0, lambda: x @ p["w"], lambda: 0.5 * wide(x)),
    lambda p, h, x: 0.8 * h + jnp.where(x[0, 0] > 0, mm(x, p["w"]), 0.5 * wide(x)),
    w=(INPUTS, UNITS),
)
row(
    "recurrence",
    lambda p, h, x: jnp.tanh(jnp.concatenate([x, h], -1) @ p["w"] + p["b"]),
    lambda p, h, x: jnp.tanh(mm(jnp.concatenate([x, h], -1), p["w"]) + ew(p["b"])),
    is_exact=False,
    w=(INPUTS + UNITS, UNITS),
    b=(UNITS,),
)


def gated(product, p, h, x):
    z, r = jnp.split(jax.nn.sigmoid(product(x, p["w"]) + product(h, p["r"])), 2, -1)
    return (1 - z) * h + z * jnp.tanh(product(x, p["v"]) + product(r * h, p["o"]))


row(
    "a gate behind a weight",
    functools.partial(gated, jnp.matmul),
    functools.partial(gated, mm),
    is_exact=False,
    w=(INPUTS, 2 * UNITS),
    r=(UNITS, 2 * UNITS),
    v=(INPUTS, UNITS),
    o=(UNITS, UNITS),
)


# --- a model and its twin -------------------------------------------------------------------------


def toy_of(rows, kind):
    """Several steps side by side, each with a state and parameters of its own."""

    def step(ops, p, h, x):
        new = {}
        for i, row in enumerate(rows):
            own = {name: p[f"{name}{i}"] for name in row.shapes}
            new[f"h{i}"] = getattr(row, kind)(own, h[f"h{i}"], x)
        return new, jnp.concatenate([jnp.sin(value) for value in new.values()], -1)

    shapes = {f"{k}{i}": s for i, row in enumerate(rows) for k, s in row.shapes.items()}
    return Toy(step, shapes, {f"h{i}": (UNITS,) for i in range(len(rows))})


def rows_of(*names):
    return [row for row in ROWS if row.name in names]


def relations_of(learner):
    """What the operations of a graph are, and which states they reach."""
    return sorted(
        (
            relation.primitive.name,
            sorted("/".join(path) for path in relation.parameter_paths),
            [state.name for group in relation.hidden_groups for state in group.hidden_states],
        )
        for relation in learner.graph.hidden_param_op_relations
    )


EXACT = [row for row in ROWS if row.is_exact]
PARTS = [*(EXACT[k::3] for k in range(3)), [row for row in ROWS if not row.is_exact]]


@pytest.mark.parametrize("part", range(len(PARTS)))
def test_a_model_has_the_relations_of_its_twin_and_its_gradient(part):
    rows = PARTS[part]
    plain, twin = toy_of(rows, "plain"), compiled(toy_of(rows, "marked"))
    learner = compiled(plain, mark="auto")
    assert relations_of(learner) == relations_of(twin)
    assert findings(learner) == findings(twin)
    expected = bptt(plain) if rows[0].is_exact else gradient(twin)
    oracle.assert_close(gradient(learner), expected, 1e-10)


# --- which parameters are marked ------------------------------------------------------------------


def marked_in(learner):
    paths = (r.parameter_paths for r in learner.graph.hidden_param_op_relations)
    return {"/".join(path) for each in paths for path in each}


def test_an_option_says_which_parameters_are_marked():
    toy = toy_of(rows_of("product", "selected"), "plain")

    def marked(mark):
        return marked_in(compiled(toy, mark=mark))

    assert marked("w0") == {"w0"}
    assert marked(lambda path: path[0].startswith("b")) == {"b0", "b1"}
    assert marked("auto") == marked(None) == {"w0", "b0", "a1", "b1"}
    with pytest.raises(braintrace.OptionError, match="'v'"):
        marked("v")
    with pytest.raises(braintrace.CompilationError, match="mark="):
        marked("explicit")


def recurrent(ops, p, h, x):
    new = 0.5 * h["h"] + jnp.tanh(ops.matmul(x, p["w"]) + h["h"] * p["d"] + p["b"])
    return {"h": new}, new @ p["out"]


RECURRENT = Toy(recurrent, "w d b out")


def test_a_model_without_marks_is_marked_by_default():
    learner = compiled(RECURRENT, marked=False)
    assert marked_in(learner) == {"w", "d", "b"}
    oracle.assert_close(gradient(learner), bptt(RECURRENT), 1e-10)


def test_a_model_with_a_mark_has_no_others_by_default():
    assert marked_in(compiled(RECURRENT)) == {"w"}
    assert marked_in(compiled(RECURRENT, mark="auto")) == {"w", "d", "b"}


def test_a_readout_that_is_marked_counts_for_nothing():
    def step(ops, p, h, x):
        new = 0.5 * h["h"] + jnp.tanh(x @ p["w"])
        return {"h": new}, ops.matmul(new, p["out"])

    assert "w" in marked_in(compiled(Toy(step)))


def test_rules_of_every_parameter_or_none_need_no_marks():
    found = gradient(compiled(RECURRENT, "rtrl", marked=False))
    oracle.assert_close(found, bptt(RECURRENT), 1e-10)


# --- what is not marked ---------------------------------------------------------------------------


@jax.custom_jvp
def softened(x, w):
    return jnp.tanh(x @ w)


softened.defjvp(lambda primals, tangents: jax.jvp(lambda x, w: jnp.tanh(x @ w), primals, tangents))


@jax.custom_vjp
def clipped_product(x, w):
    return x @ w


clipped_product.defvjp(
    lambda x, w: (x @ w, x), lambda x, y: (jnp.zeros_like(x), jnp.clip(x.T @ y, -1, 1))
)


def long_loop(x, w):
    step = lambda h, _: (h + 0.01 * (x @ w - h), None)  # noqa: E731
    return jax.lax.scan(step, jnp.zeros((BATCH, UNITS)), None, length=40)[0]


def listed(x, w):
    matrix = jax.experimental.sparse.BCOO((w, np.argwhere(MASK.T)), shape=MASK.T.shape)
    return (matrix @ x.T).T


UNMARKED = {
    "a lookup": (lambda x, w: w[(10 * x[:, 0]).astype(int) % 3], "embedding", (3, UNITS)),
    "a sparse matrix": (listed, "sparse_matmul", (int(MASK.sum()),)),
    "a derivative of its own": (softened, "rule", (INPUTS, UNITS)),
    "a backward rule of its own": (clipped_product, "rule", (INPUTS, UNITS)),
    "a long loop": (long_loop, "inner steps", (INPUTS, UNITS)),
    "a precision": (lambda x, w: jnp.dot(x, w, precision="highest"), "precision", (INPUTS, UNITS)),
}


@pytest.mark.parametrize("name", UNMARKED)
def test_what_is_not_marked_is_reported_and_has_the_gradient_of_its_step(name):
    function, word, shape = UNMARKED[name]

    def step(mark, ops, p, h, x):
        decay = ops.element_wise(p["d"], jnp.tanh)
        new = decay * h["h"] + jnp.sin(function(x, p["u"]))
        return {"h": new}, new

    toy = Toy(functools.partial(step, None), {"u": shape, "d": (UNITS,)})
    learner = compiled(toy, marked=False, mark="auto")
    (found,) = [d for d in learner.graph.diagnostics if d.kind == "not-marked"]
    assert found.level == "warning"
    assert found.paths[0] == "u"
    assert word in found.message
    assert "test_marks.py" in found.source
    expected = gradient(compiled(toy, "immediate"))
    oracle.assert_close({"u": gradient(learner)["u"]}, {"u": expected["u"]}, 1e-10)


def test_low_rank_and_noise_lose_a_trace_and_are_reported():
    def step(ops, p, h, x):
        noise = 1 + 0.1 * jnp.sin(x[0, 0])
        new = 0.5 * h["h"] + x @ p["B"] @ p["A"] + x @ (p["w"] * noise)
        return {"h": new}, new

    toy = Toy(step, {"B": (INPUTS, 2), "A": (2, UNITS), "w": (INPUTS, UNITS)})
    learner = compiled(toy, mark="auto")
    assert "B" in {path for d in warned(learner) for path in d.paths}


@pytest.mark.parametrize("mark", [None, "explicit", "auto"])
@pytest.mark.parametrize("name", ["matmul", "element_wise", "lora_matmul"])
def test_an_operation_mapped_over_its_weight_is_marked(name, mark):
    def step(ops, p, h, x):
        if name == "matmul":
            drive = jax.vmap(lambda w: mm(x, w))(p["u"])
        elif name == "element_wise":
            drive = (
                x[:, :1] * jax.vmap(lambda w: braintrace.element_wise(w, jnp.tanh))(p["u"])[:, :1]
            )
        else:
            low, a = p["u"][..., :1], jnp.ones((1, UNITS))
            drive = jax.vmap(lambda w: braintrace.lora_matmul(x, w, a))(low)
        return {"h": 0.5 * h["h"] + drive.sum(0)}, h["h"]

    toy = Toy(step, {"u": (2, INPUTS, UNITS)})
    learner = compiled(toy, mark=mark)
    assert not findings(learner)
    assert marked_in(learner) == {"u"}
    oracle.assert_close(gradient(learner), bptt(toy), 1e-10)


# --- regions of `braintrace.mark` -----------------------------------------------------------------


def drive_of(p, x):
    """Products behind a call, a map and a branch, and a bias."""
    y = jax.jit(jnp.matmul)(x, p["w"]) + jax.vmap(lambda x: x @ p["v"])(x)
    return jax.lax.cond(x[0, 0] > 0, lambda: y, lambda: 0.5 * x @ p["v"]) + p["b"]


def beside(drive, ops, p, h, x):
    new = p["d"] * h["h"] + jnp.tanh(drive(p, x)) + x @ p["u"]
    return {"h": new}, new @ p["out"]


BESIDE = {"w": (INPUTS, UNITS), "v": (INPUTS, UNITS), "u": (INPUTS, UNITS)}
BESIDE |= {"b": (UNITS,), "d": (UNITS,), "out": (UNITS, 2)}


def test_a_marked_function_learns_and_the_rest_does_not():
    toys = [
        Toy(functools.partial(beside, f), BESIDE) for f in (drive_of, braintrace.mark(drive_of))
    ]
    plain, marked = toys
    everything, part = compiled(plain, mark="auto"), compiled(marked)
    assert marked_in(everything) == {"w", "v", "b", "u", "d"}
    assert marked_in(part) == {"w", "v", "b"} == marked_in(compiled(marked, mark="explicit"))
    assert marked_in(compiled(marked, mark="d")) == {"w", "v", "b", "d"}
    assert {path for d in warned(part) for path in d.paths} >= {"d"}
    learned, expected = gradient(part), bptt(plain)
    oracle.assert_close({k: learned[k] for k in "wvb"}, {k: expected[k] for k in "wvb"}, 1e-10)


def test_rules_without_marks_take_a_marked_function_as_it_is():
    plain, marked = (
        Toy(functools.partial(beside, f), BESIDE) for f in (drive_of, braintrace.mark(drive_of))
    )
    found, expected = (
        gradient(compiled(toy, "immediate", marked=False)) for toy in (marked, plain)
    )
    oracle.assert_close(found, expected, 1e-10)


def test_a_region_without_parameters_leaves_the_default():
    def step(ops, p, h, x):
        new = 0.5 * h["h"] + jnp.tanh(x @ p["w"])
        return {"h": new}, braintrace.mark(jnp.tanh)(new) @ p["out"]

    assert marked_in(compiled(Toy(step))) == {"w"}


class Rate(brainstate.nn.Module):
    """A leaky state behind a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.scale = layer, brainstate.ParamState(jnp.full(UNITS, 0.9))

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, UNITS)))

    def update(self, x):
        self.h.value = self.scale.value * self.h.value + self.layer(x)
        return self.h.value


def test_of_a_class_and_of_a_module_the_paths_and_keys_are_its_own():
    Linear = brainstate.nn.Linear
    Marked = braintrace.mark(Linear)
    assert issubclass(Marked, Linear)
    assert (Marked.__name__, Marked.__doc__) == (Linear.__name__, Linear.__doc__)
    layer = Linear(INPUTS, UNITS)
    for marked in (Marked(INPUTS, UNITS), braintrace.mark(layer)):
        learner = braintrace.compile(Rate(marked), "d_rtrl", XS[0], batch_size=BATCH)
        assert list(learner.module.states(brainstate.ParamState)) == [
            ("layer", "weight"),
            ("scale",),
        ]
        assert list(learner.graph.trace_specs) == [
            "layer/weight@mm0>h",
            "layer/weight@elemwise1>h",
        ]
    assert type(layer) is Linear
    assert marked.weight is layer.weight


@pytest.mark.parametrize("library", ["flax.nnx", "equinox"])
def test_a_part_of_a_model_of_another_library_is_marked(library):
    module = pytest.importorskip(library)
    if library == "equinox":
        parts = [module.nn.Linear(INPUTS, UNITS, key=jax.random.key(k)) for k in (0, 1)]
        run = lambda part, x: jax.vmap(part)(x)  # noqa: E731
        split, merge = lambda parts: module.partition(parts, module.is_array), module.combine
    else:
        parts = [module.Linear(INPUTS, UNITS, rngs=module.Rngs(k)) for k in (0, 1)]
        run = lambda part, x: part(x)  # noqa: E731
        split = lambda parts: module.split(module.List(parts))[::-1]  # noqa: E731
        merge = lambda params, graph: module.merge(graph, params)  # noqa: E731
    params, rest = split([braintrace.mark(parts[0]), parts[1]])
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), params)

    def step(params, h, x):
        first, second = merge(params, rest)
        new = 0.8 * h + jnp.tanh(run(first, x)) + run(second, x)
        return new, new

    model = braintrace.from_function(step, params, jnp.zeros((BATCH, UNITS)))
    learner = braintrace.compile(model, "d_rtrl", XS[0])
    assert {path.split("/")[1] for path in marked_in(learner)} == {"0"}
