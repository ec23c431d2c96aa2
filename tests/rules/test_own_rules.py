"""Learning rules from outside the package, on every path that a user can take.

`rules.py` has a row for two of them, so that all laws that hold for rules are tested on these too.
"""

import ast
import dataclasses
import functools
import inspect
import re

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import own_rules
import pytest
from assertions import assert_gradients_close, assert_states_close
from catalogue import MODELS
from catalogue_runs import PATHS as RUNS
from catalogue_runs import Runs, expected
from coupled_networks import Model, Network
from coupled_networks import bptt as bptt_of_network
from every_path import Paths
from every_path import loss as loss_of_path
from operation_cases import BATCH, CASES, Diagonal, by_name, loss
from operation_cases import DECAY as LEAK
from own_rules import Carrying, Decaying, Filtering

import braintrace

FADE = 0.6
BY_NAME = {case.name: case for case in CASES}
CASE = BY_NAME["matmul with bias"]
LENGTH = 6
XS = np.random.default_rng(1).normal(size=(LENGTH, BATCH, 3)).astype(np.float32)
RESET = np.stack([np.arange(LENGTH) == 2, np.arange(LENGTH) % 4 == 3], axis=1)


def compiled(rule, model=None, xs=XS, **options):
    model = Diagonal(CASE) if model is None else model
    return braintrace.compile(model, rule, xs[0], batch_size=BATCH, **options)


def gradient(learner, xs=XS, loss=loss, **options):
    options = {"reduction": "sum", "chunk_size": 3, **options}
    return by_name(learner.etrace_grad(xs, step_fn=lambda x: loss(learner(x)), **options))


# --- the oracle: plain JAX, one sample after the other --------------------------------------------


def decaying(xs, of_step, case=CASE, decay=FADE, keep=None, weights=None, traces=False):
    """Gradients of the losses by ``E' = decay E + dh'/dw``, of one recurrence of `Diagonal`.

    keep: which samples go on at each step; weights: of each step's loss; traces: also give E.
    """
    keep = np.ones((len(xs), BATCH)) if keep is None else keep
    weights = np.ones(len(xs)) if weights is None else weights
    total, E = _decaying(of_step, case)(decay, (np.asarray(xs), keep, weights))
    return (total, E) if traces else total


@functools.cache
def _decaying(of_step, case):
    """The program of `decaying`."""

    def step(decay, carry, now):
        (h, E, total), (x, alive, weight) = carry, now
        h, E = jax.tree.map(lambda leaf: jax.vmap(jnp.multiply)(alive, leaf), (h, E))
        new = jax.jacrev(lambda params: plain_step(case, h, x, params))(case.parameters)
        E = jax.tree.map(lambda old, new: decay * old + new, E, new)
        h = plain_step(case, h, x, case.parameters)
        mu = weight * jax.grad(of_step)(h)
        total = jax.tree.map(lambda g, e: g + jnp.tensordot(mu, e, mu.ndim), total, E)
        return (h, E, total), None

    @jax.jit
    def run(decay, sequences):
        params, h = case.parameters, jnp.zeros((BATCH, *case.hidden))
        E = jax.tree.map(lambda w: jnp.zeros((*h.shape, *jnp.shape(w))), params)
        start = h, E, jax.tree.map(jnp.zeros_like, params)
        sequences = jax.tree.map(lambda leaf: jnp.asarray(leaf, h.dtype), sequences)
        _, E, total = jax.lax.scan(functools.partial(step, decay), start, sequences)[0]
        return total, E

    return run


def plain_step(case, h, x, params):
    return LEAK * h + jnp.tanh(case.plain(x, params))


# --- what a rule is made of -----------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Decaying, Carrying, Filtering])
def test_a_rule_takes_thirty_lines_with_public_names(rule):
    assert len(inspect.getsource(rule).splitlines()) <= 30
    tree = ast.parse(inspect.getsource(own_rules))
    imported = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {ast.unparse(node) for node in imported} == {
        "import dataclasses",
        "import jax",
        "import jax.numpy as jnp",
    }
    assert isinstance(rule("full"), braintrace.Rule)


BY_OPERATION, OF_STATES = ("elementwise", "diagonal"), ("layered", "full")
TWO_STATES = ((0.8, -0.3), (0.4, 0.6))


@pytest.mark.parametrize(
    ("jacobian", "case"),
    [("elementwise", BY_NAME["element_wise scalar"]), ("layered", BY_NAME["embedding"])],
)
@pytest.mark.usefixtures("float64")
def test_a_rule_that_carries_everything_is_backpropagation(jacobian, case):
    """Within groups of two states; of all states, through recurrent products too."""
    network = Network(case, TWO_STATES, is_recurrent=jacobian in OF_STATES)
    learner = compiled(Carrying(jacobian), Model(network), network.inputs)
    for options in ({"chunk_size": 3}, {"chunk_size": 1}):
        learner.reset_state(BATCH)
        found = gradient(learner, network.inputs, **options)
        assert_gradients_close(found, bptt_of_network(network), 1e-10, f"{options}")


@pytest.mark.parametrize(
    ("case", "path"),
    [
        (BY_NAME["lora_matmul with bias"], Paths.foreign_vmap),
        (BY_NAME["embedding"], Paths.sequence),
    ],
)
def test_every_path(case, path):
    paths = paths_of(case)
    wanted = decaying(case.inputs, loss_of_path, case)
    found = {key.rpartition("/")[2]: value for key, value in path(paths).items()}
    assert_gradients_close(found, wanted, 1e-5, f"{case.name}, {path.__name__}")


@functools.cache
def paths_of(case):
    return Paths(lambda: Diagonal(case), case.inputs, Decaying(FADE))


DOWNSTREAM = ("FilteredOutput", "LSTMFused", "LSTMPeephole", "LSTMReshapedGates", "LSTMSeparate")
DOWNSTREAM += ("ReadByAProductAlone",)
"""Models with a state that later steps read through operations alone, or not; see `Gated`."""


ORACLES = {
    Decaying: functools.partial(oracles.dense_d_rtrl, decay=FADE),
    Filtering: functools.partial(oracles.dense_ottt, decay=FADE),
}


@pytest.mark.rows("Decaying-ReadsAnOldState")
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("rule", "entry"),
    [
        pytest.param(rule, entry, id=f"{rule.__name__}-{entry.name}")
        for rule in ORACLES
        for entry in MODELS
        if rule is Filtering or entry.name not in DOWNSTREAM
    ],
)
def test_models_of_the_catalogue(rule, entry):
    wanted, runs = expected(entry, ORACLES[rule]), Runs(entry, rule(FADE))
    left = []
    for path, run in RUNS.items():
        assert_gradients_close(run(runs), wanted, 1e-9, f"{entry.name}, {path}")
        left += [] if path.startswith("chunks") else [runs.after()]
    assert_states_close(left[0], left[1], entry.name)


class Gated(brainstate.nn.Module):
    """``c' = a c + i g`` and ``h = o tanh(c')``, which no later step reads."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(CASE.parameters["w"][:, :4])

    def init_state(self, batch_size=None):
        self.c = brainstate.HiddenState(jnp.zeros((batch_size, 2)))
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 2)))

    def update(self, x):
        g, o = jnp.split(jnp.tanh(braintrace.matmul(x, self.w.value)), 2, -1)
        self.c.value = LEAK * self.c.value + g
        self.h.value = o * jnp.tanh(self.c.value)
        return self.h.value


def test_a_state_that_nobody_remembers_has_the_direct_part_of_a_trace():
    """What the new ``c`` is worth in ``h`` is a part of its own learning signal."""

    def gates(w, x):
        return jnp.split(jnp.tanh(x @ w), 2, -1)

    @jax.jit
    def through_time(w):
        def step(carry, x):
            c, E, total = carry
            c = LEAK * c + gates(w, x)[0]
            of_c = jax.jacrev(lambda w: gates(w, x)[0])(w)
            of_h = jax.jacrev(lambda w: gates(w, x)[1] * jnp.tanh(c))(w)
            E = [FADE * old + new for old, new in zip(E, (of_c, of_h), strict=True)]
            o = gates(w, x)[1]
            to_h = jax.grad(loss)(o * jnp.tanh(c))
            to_c = jax.grad(lambda c: loss(o * jnp.tanh(c)))(c)
            return (c, E, total + jnp.tensordot(to_c, E[0], 2) + jnp.tensordot(to_h, E[1], 2)), None

        E = [jnp.zeros((BATCH, 2, *w.shape)) for _ in "ch"]
        return jax.lax.scan(step, (jnp.zeros((BATCH, 2)), E, jnp.zeros_like(w)), XS)[0][2]

    total = through_time(CASE.parameters["w"][:, :4])
    found = gradient(compiled(Decaying(FADE), Gated()))
    assert_gradients_close(found, {"w": total}, 1e-5)


def test_masks_and_resets_leave_nothing_of_what_does_not_count():
    """Steps before a reset are padded with NaN, and do not count."""
    weights = np.float32([1, 0, 2, 0.5, 1, 3])
    learner = compiled(Decaying(FADE))
    options = {"chunk_size": 4}  # and one of two steps
    found = gradient(learner, mask=weights, reset=RESET, **options)
    wanted = decaying(XS, loss, keep=~RESET, weights=weights)
    assert_gradients_close(found, wanted, 1e-5)
    padded, first = np.copy(XS), np.zeros((LENGTH, BATCH), bool)
    padded[:2], first[2] = np.nan, True
    learner.reset_state(BATCH)
    counts = np.float32(np.arange(LENGTH) > 1)
    found = gradient(learner, padded, mask=counts, reset=first, **options)
    assert_gradients_close(found, decaying(XS[2:], loss), 1e-5)


def test_windows_end_in_the_traces_before_them():
    """Exact within a window, and the rule's own for the time before: with the leak, all of it."""
    learner = compiled(Decaying(FADE), window=3)
    exact = gradient(compiled("d_rtrl"))
    whole = gradient(learner, window=LENGTH)
    assert_gradients_close(whole, exact, 1e-5)
    learner.reset_state(BATCH)
    parts = [gradient(learner, xs) for xs in (XS[:3], XS[3:])]
    assert not np.allclose(parts[0]["w"] + parts[1]["w"], exact["w"], rtol=1e-3)
    leak = compiled(Decaying(LEAK), window=2)
    assert_gradients_close(gradient(leak), exact, 1e-5)


def test_a_rule_beside_another_one_has_its_own_gradients():
    def found(rule, **options):
        draw = np.random.default_rng(0).normal
        weights = {"w_init": np.float32(draw(size=(3, 4))), "u_init": np.linspace(0.1, 0.9, 4)}
        learner = compiled(rule, braintrace.nn.IndRNN(3, 4, **weights), **options)
        return learner.etrace_grad(XS, step_fn=lambda x: loss(learner(x)), reset=RESET)

    mixed = found("d_rtrl", rules={"W": Decaying(FADE)})
    fading, exact = found(Decaying(FADE)), found("d_rtrl")
    wanted = {path: (fading if path[0] == "W" else exact)[path] for path in exact}
    for path, value in wanted.items():
        assert_gradients_close({"": mixed[path]}, {"": value}, 1e-5, path)
    assert not np.allclose(fading[("u",)], exact[("u",)], rtol=1e-2)


def test_checks_take_a_rule():
    check = braintrace.gradient_check(
        Diagonal(CASE), Decaying(FADE), XS, XS, lambda h, _: loss(h), batch_size=BATCH
    )
    found, exact = decaying(XS, loss), decaying(XS, loss, decay=LEAK)
    for row in check.rows[:-1]:
        name = row.parameter.rpartition("/")[2]
        deviation = np.linalg.norm(found[name] - exact[name]) / np.linalg.norm(exact[name])
        np.testing.assert_allclose(row.deviation, deviation, rtol=1e-3)


def test_a_learner_names_the_rule_and_its_options():
    learner = compiled(Decaying(FADE), mark="explicit")
    assert type(learner.algorithm).__name__ == "Decaying"
    assert learner.algorithm.rule == "Decaying(decay=0.6)"
    (row,) = learner.report().relations
    assert row.traces == (("h", "bias", (BATCH, 5)), ("h", "weight", (BATCH, 3, 5)))
    assert row.stored_bytes == learner.report().carried_bytes == 4 * BATCH * (5 + 15)
    other = compiled(Decaying(0.5)).functional()
    with pytest.raises(braintrace.OptionError, match=r"Decaying\(decay=0.6\).*Decaying\(decay=0.5"):
        other.restore(learner.functional().state())
    assert type(compiled(Decaying(FADE)).algorithm) is type(learner.algorithm)


# --- traces of any form ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Counting(Decaying):
    """It also counts the steps of each sample from a number on, and those of all sequences."""

    first: int = 3

    def init(self, site):
        every = braintrace.TraceSpec((), jnp.int32, (), outlives_reset=True)
        return {"E": site.zeros(), "steps": np.full(site.samples, self.first), "every": every}

    def advance(self, site, trace, J, x, F):
        E = super().advance(site, trace["E"], J, x, F)
        return {"E": E, "steps": trace["steps"] + 1, "every": trace["every"] + 1}

    def contract(self, site, trace, mu):
        return site.contract(mu, trace["E"])


@pytest.mark.parametrize("first", [0, 3])
def test_a_trace_is_any_pytree_of_arrays(first):
    learner = compiled(Counting(FADE, first), trace_dtype=jnp.bfloat16)

    def counts():
        traces = learner.algorithm.traces.value
        (place,) = {key.partition("[")[0] for key in traces}
        assert place == "parameters_of/w,parameters_of/b@mm0>h"
        halves = [key for key, trace in traces.items() if trace.dtype == jnp.bfloat16]
        assert halves == [f"{place}['E']['h']['{name}']" for name in ("bias", "weight")]
        steps, every = (traces[f"{place}['{key}']"] for key in ("steps", "every"))
        return list(steps), int(every)

    assert counts() == ([first, first], 0)
    found = gradient(learner, reset=RESET)
    assert_gradients_close(found, decaying(XS, loss, keep=~RESET), 2e-2)
    assert counts() == ([first + 4, first + 3], LENGTH)
    learner.reset_state(where=np.array([True, False]))
    assert counts() == ([first, first + 3], LENGTH)
    learner(XS[0])
    learner.etrace_evolve(XS[1:])
    assert counts() == ([first + 6, first + 9], 2 * LENGTH)
    learner.reset_state()
    assert counts() == ([first, first], 2 * LENGTH)


# --- what is no rule ------------------------------------------------------------------------------


def wrong(**methods):
    return dataclasses.dataclass(frozen=True)(type("Wrong", (Decaying,), methods))(FADE)


WRONG = {
    "a shape that changes": (
        {"advance": lambda self, site, E, J, x, F: jax.tree.map(lambda e: e[:1], E)},
        braintrace.ShapeError,
        r"`Wrong.advance` returned shape \(1, 5\) at '\['h'\]\['bias'\]' for `etp_mm` of "
        r"'parameters_of/.*expected \(2, 5\)",
    ),
    "a structure that changes": (
        {"advance": lambda self, site, E, J, x, F: E["h"]},
        braintrace.OptionError,
        r"`Wrong.advance` returned .* for `etp_mm`.*expected the structure",
    ),
    "a gradient of less": (
        {"contract": lambda self, site, E, mu: {"weight": site.contract(mu, E)["weight"]}},
        braintrace.OptionError,
        r"`Wrong.contract` returned .* for `etp_mm`.*expected the structure",
    ),
    "a gradient for each sample": (
        {"contract": lambda self, site, E, mu: E["h"]},
        braintrace.ShapeError,
        r"`Wrong.contract` returned shape \(2, 5\) at '\['bias'\]' .*expected \(5,\)",
    ),
    "no axis of samples": (
        {"init": lambda self, site: np.zeros(7)},
        braintrace.ShapeError,
        r"`Wrong.init` returned shape \(7,\).*expected 2 samples.*`TraceSpec`",
    ),
    "another Jacobian": (
        {"jacobian": "diagnal"},
        braintrace.OptionError,
        "`jacobian` of the learning rule `Wrong` is 'diagnal'; expected one of",
    ),
    "no Jacobian": ({"jacobian": None}, braintrace.OptionError, "`Wrong` is None; expected one of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_told_with_its_place(name):
    methods, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        compiled(wrong(**methods))


@pytest.mark.parametrize("jacobian", OF_STATES)
@pytest.mark.parametrize("product", ["input_zeros", "output_zeros"])
def test_all_states_have_no_operation(jacobian, product):
    asking = wrong(jacobian=jacobian, init=lambda self, site: getattr(site, product)())
    with pytest.raises(braintrace.OptionError, match=f"`Site.{product}` needs one operation"):
        compiled(asking)


@pytest.mark.parametrize("jacobian", OF_STATES)
def test_a_wrong_rule_of_all_states_is_told_as_well(jacobian):
    short = wrong(jacobian=jacobian, contract=lambda self, site, E, mu: {})
    with pytest.raises(braintrace.OptionError, match=r"`Wrong.contract` returned .*the hidden"):
        compiled(short)
    message = r"shape \(2, 5, 3\) at '\['parameters_of/w'\]' for the hidden states"
    with pytest.raises(braintrace.ShapeError, match=message):
        compiled(wrong(jacobian=jacobian, advance=cut_rows))


def cut_rows(self, site, E, J, x, F):
    return jax.tree.map(lambda e: e[..., 0] if e.ndim > 3 else e, E)


def test_an_error_of_the_rule_itself_keeps_its_type_and_says_where():
    def fails(self, site, E, J, x, F):
        raise ZeroDivisionError("of its own")

    with pytest.raises(ZeroDivisionError, match="of its own") as caught:
        compiled(wrong(advance=fails))
    message = r"`Wrong.advance` was called for `etp_mm` of 'parameters_of/"
    assert any(re.match(message, note) for note in caught.value.__notes__)


class NoDataclass(Decaying):
    """It is one by its base, and its fields can be changed."""

    __hash__ = None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Decaying, r"or a `braintrace.Rule`"),
        (NoDataclass(FADE), r"`NoDataclass` is .*expected a frozen dataclass"),
        (Decaying(np.ones(3)), r"`Decaying` is .*no arrays"),
        (3, r"`algorithm` is 3; expected .* or a `braintrace.Rule`\.$"),
    ],
)
def test_what_is_no_rule_is_refused(given, message):
    with pytest.raises(braintrace.OptionError, match=message):
        compiled(given)
