"""Any model, rule, path, window, mask and reset: the gradient is the one of plain JAX.

Cases are drawn so that as many pairs of their features as possible meet in the fewest cases. A case
that fails prints the program that runs it again.
"""

import dataclasses
import functools
import json
import os
import pathlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import random_models
from catalogue_models import spike
from learners import TARGETS, XS, quietly_compiled, squared_error
from paths import PATHS, Request
from random_models import (
    BATCH,
    STEPS,
    Layer,
    Marked,
    Module,
    RandomModel,
    named,
)
from toys import Toy

import braintrace

COUNT = int(os.environ.get("EXAMPLES", "40"))
PATHS_WITH_WINDOWS = {*PATHS} - {"by_own_gradient"}
MASKS = {
    "none": (1, 1, 1, 1, 1, 1),
    "some": (1, 0, 2, 0.5, 0, 1),
    "end": (0, 1, 1, 2, 0.5, 0),
    "last": (0, 0, 0, 0, 0, 1),
}
RESETS = {
    "none": (),
    "one sample": ((2, 0), (4, 0), (5, 0)),
    "each": ((2, 1), (3, 0)),
    "all": ((3, 0), (3, 1)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One gradient; `nan`: the numbers that should not matter are NaN."""

    model: RandomModel
    rule: str = "d_rtrl"
    path: str = "by_chunks"
    window: int | None = None
    mask: str = "none"
    reset: str = "none"
    nan: bool = False
    chunk_size: int | str = "auto"
    form: str = "module"
    marks: str = "marked"
    vmap: bool = False

    def features(self):
        """What should meet each other; above all, all models with D_RTRL."""
        first, *others = self.model.layers
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "model"}
        own |= dataclasses.asdict(first) | {"readout": self.model.readout, "layers": len(others)}
        own["window"] = self.window is not None
        own["of D_RTRL"] = self.rule == "d_rtrl" and self.window is None
        return own | {"above": others[0].cell if others else None}

    def is_valid(self):
        layers, windows = self.model.layers, self.window is not None
        drives, linked = {layer.drive for layer in layers}, {layer.recurrent for layer in layers}
        if windows and self.path not in PATHS_WITH_WINDOWS:
            return False
        if windows and self.path in ("by_two_calls", "by_checkpoints") and 3 % self.window:
            return False
        if self.marks == "auto" and (drives | linked) & {
            "low rank",
            "sparse",
            "doubled",
            "embedding",
        }:
            return False
        if self.rule == "ostl_recurrent" and self.model.readout == "leaky":
            return False  # a readout with a memory is a layer of its own there
        if self.nan and (self.path == "by_own_gradient" or self.mask not in ("some", "end")):
            return False
        if self.form == "joined states" and self.marks == "units":
            return False
        has_more = len(layers) > 1 or "sparse" in linked or self.model.readout == "leaky"
        return not (self.rule in ("snap", "snap2") and has_more)  # see `oracle.snap_n`

    def request(self):
        reset = np.zeros((STEPS, BATCH), bool)
        for t, b in RESETS[self.reset]:
            reset[t, b] = True
        xs, mask = XS.copy(), np.array(MASKS[self.mask], float)
        if self.nan:
            # A padded step, of which nothing is left after the reset or the end.
            reset[:] = False
            if self.mask == "some":
                xs[1], reset[2] = np.nan, True
            else:
                xs[5] = np.nan
        return Request(xs, TARGETS, mask, reset, self.window, self.chunk_size)


def draw_case(rng):
    while True:
        case = Case(
            random_models.draw_model(rng),
            rng.choice(("d_rtrl", *RULES)),
            rng.choice([*PATHS]),
            rng.choice([None, None, None, None, None, 1, 2, 3, STEPS]),
            rng.choice([*MASKS]),
            rng.choice([*RESETS]),
            rng.choice([False, True]),
            rng.choice(["auto", 1, 2, 4]),
            rng.choice(random_models.FORMS),
            rng.choice(["marked", "marked", "units", "auto"]),
            rng.choice([False, True]),
        )
        if case.is_valid():
            return case


RULES = ("d_rtrl", "rtrl", "immediate", "snap", "snap2", "ostl_recurrent")
CASES = random_models.draw_widely(random.Random(5), draw_case, Case.features, COUNT)


def learner_of(case, dtype=np.float64, **options):
    model = random_models.model_of(case.model, case.form, case.marks, dtype, case.vmap)
    if case.marks == "auto":
        options["mark"] = "auto"
    rule = case.rule
    if rule in ("snap", "snap2"):
        rule, options["n"] = "snap", int(rule[4:] or 1)
    if case.path in ("by_pure_function", "by_mapped_learners") and case.window is not None:
        options["window"] = case.window  # which says what their traces have
    return quietly_compiled(
        model, rule, XS[0].astype(dtype), batch_size=BATCH, vmap=case.vmap, **options
    )


def expected_of(case):
    asked = case.request()
    given = case.model, case.model.params(), np.nan_to_num(asked.xs)

    def loss(t, y, *sample):
        return squared_error(y, jnp.asarray(TARGETS)[(t, *sample)])

    is_masked = case.model.layers[0].recurrent == "masked"
    if case.rule == "snap" or (case.rule == "snap2" and is_masked):
        n = int(case.rule[4:] or 1)
        return oracle.snap_n(*given, loss, n, asked.mask, asked.reset, case.window)
    model, *rest = given
    rule = "rtrl" if case.rule == "snap2" else case.rule
    return oracle.gradient_by_rule(model, rule, *rest, loss, case.window, asked.mask, asked.reset)


def check(case, tolerance=1e-9):
    found = PATHS[case.path](learner_of(case), case.request(), squared_error)
    oracle.assert_close(found, expected_of(case), tolerance, f"\ncheck({case})\n")


@pytest.mark.core
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("number", range(COUNT))
def test_any_gradient_is_the_one_of_plain_jax(number):
    check(CASES[number])


# What pairs of features alone do not bring together: SnAp of a recurrent weight, layers in windows,
# a reset in a chunk whose traces a second call reads, and windows of one step in a stream.
CHOSEN = [
    Case(RandomModel((Layer("bias", "matmul", "plain"),)), "snap"),
    Case(
        RandomModel((Layer("bias", "gain", "plain"), Layer("function", "gain", "leak"))),
        window=3,
    ),
    Case(
        RandomModel((Layer("bias", "matmul", "plain"),)),
        "rtrl",
        "by_two_calls",
        reset="each",
        chunk_size=4,
    ),
    Case(RandomModel((Layer("bias", "matmul", "plain"),)), path="by_stream", window=1),
]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("number", range(len(CHOSEN)))
def test_a_gradient_of_few_features_is_the_one_of_plain_jax(number):
    check(CHOSEN[number])


# --- in single and half precision -----------------------------------------------------------------

PRECISIONS = {"float32": 1e-4, "bfloat16": 0.08}
SMOOTH = [
    Case(RandomModel((Layer("joined", "matmul", "lstm"),)), chunk_size=2, mask="some"),
    Case(RandomModel((Layer("bias", "gain", "adapting", "sine"),), "leaky"), "snap", "by_stream"),
    Case(RandomModel((Layer("conv", "matmul", "leak"),), "late"), "rtrl", reset="each"),
]


@pytest.mark.parametrize("number", range(len(SMOOTH)))
@pytest.mark.parametrize("name", PRECISIONS)
def test_a_gradient_in_less_precision_is_rounded(name, number):
    case, dtype = SMOOTH[number], jnp.dtype(name)
    asked = case.request()
    sequences = {"xs": asked.xs.astype(dtype), "targets": asked.targets.astype(dtype)}
    sequences["mask"] = asked.mask.astype(np.float32)
    asked = dataclasses.replace(asked, **sequences)
    found = PATHS[case.path](learner_of(case, dtype), asked, squared_error)
    with jax.enable_x64(True):
        expected = expected_of(case)
    oracle.assert_close(found, expected, PRECISIONS[name], f"{name}: {case}")


def test_a_sum_of_many_steps_does_not_stop_in_half_precision():
    """A sum of ones in bfloat16 itself stops at 256."""

    def step(params, h, x):
        h = 0.5 * h + braintrace.matmul(x, params["w"])
        return h, h + params["b"]

    steps, half = 1200, functools.partial(jnp.ones, dtype=jnp.bfloat16)
    xs, params = half((steps, 1, 2)), {"w": half((2, 3)), "b": half(3)}
    model = braintrace.from_function(step, params, half((1, 3)))
    learner = braintrace.compile(model, "d_rtrl", xs[0], batch_size=1)
    found = learner.etrace_grad(xs, step_fn=lambda x: learner(x).sum(), reduction="sum")
    np.testing.assert_array_equal(found["b"], steps)
    np.testing.assert_allclose(found["w"].astype(float), 2 * steps - 2, rtol=0.01)


# --- stored gradients -----------------------------------------------------------------------------

# The ones that the library gave when it was tested in full, to the tenth digit. The files have the
# numbers of a model, its data, and rows of gradients by rule and path, flat and in the order of the
# names. They are never written again.
GOLDEN = pathlib.Path(__file__).parent / "support" / "golden"
STORED_RULES = {"d_rtrl": {}, "es_d_rtrl": {"decay_or_rank": 0.7}, "rtrl": {}}


def independent(ops, p, h, x):
    y = ops.matmul(x, p["w_in"], p["b"]) + ops.element_wise(p["u"], lambda u: u) * h["h"]
    return {"h": jnp.tanh(y)}, jnp.tanh(y) @ p["w_out"]


def gated(ops, p, s, x):
    h = s["h"]
    r, z = jnp.split(jax.nn.sigmoid(ops.matmul(jnp.concatenate([x, h], -1), p["w_rz"])), 2, -1)
    n = jnp.tanh(ops.matmul(x, p["w_in"], p["b"]) + r * ops.matmul(h, p["w_rec"]))
    h = (1 - z) * h + z * n
    return {"h": h}, h @ p["w_out"]


def adapting(ops, p, s, x):
    z = spike(s["V"] - 1 - 0.5 * s["a"])
    y = ops.matmul(x, p["w_in"]) + ops.matmul(z, p["w_rec"])
    new = {"V": 0.9 * s["V"] - z + y, "a": 0.95 * s["a"] + z}
    new["o"] = 0.8 * s["o"] + spike(new["V"] - 1 - 0.5 * new["a"]) @ p["w_out"]
    return new, new["o"]


STORED_STEPS = {"indrnn": independent, "gru": gated, "alif": adapting}


class Stored(Toy):
    """A step with the numbers of a file."""

    def params(self, dtype=np.float64):
        return {k[2:]: jnp.asarray(v) for k, v in self.weights.items() if k.startswith("p/")}

    def start(self, *batch, dtype=np.float64):
        states = {k[2:]: v for k, v in self.weights.items() if k.startswith("s/")}
        return {k: jnp.asarray(np.broadcast_to(v, (*batch, *v.shape))) for k, v in states.items()}


@pytest.mark.usefixtures("float64")
@pytest.mark.filterwarnings("ignore::braintrace.ApproximationWarning")
@pytest.mark.parametrize("rule", STORED_RULES)
@pytest.mark.parametrize("name", STORED_STEPS)
def test_gradients_are_the_stored_ones(name, rule):
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as file:
        stored = dict(file)
    module = Module(Stored(STORED_STEPS[name], stored), Marked(), np.float64)
    xs, targets = stored["xs"], stored["targets"]
    options = {**STORED_RULES[rule], "batch_size": xs.shape[1]}
    learner = braintrace.compile(module, rule, xs[0], **options)
    rows = json.loads(str(stored["rows"]))[rule]
    for path, asked in {
        "chunks of 3": {"chunk_size": 3},
        "mask and reset": {k: stored[k] for k in ("mask", "reset")},
    }.items():
        learner.reset_state()
        gradients = learner.etrace_grad(
            *(xs, targets),
            step_fn=lambda x, y: 0.5 * jnp.sum((learner(x) - y) ** 2),
            reduction="sum",
            **asked,
        )
        found = np.concatenate([np.ravel(g) for _, g in sorted(named(gradients).items())])
        expected = stored["values"][rows[path]]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10 * np.abs(expected).max())
