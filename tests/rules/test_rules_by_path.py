"""Several algorithms in one model: the gradient of each weight is that of its algorithm alone."""

import copy
import functools

import brainstate
import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_gradients_close, assert_same_bits, assert_states_close
from drivers import (
    build_learner,
    calls_gradient,
    expected_warnings,
    sequence_gradient,
    snapshot,
)
from models import small

import braintrace
from braintrace._graph import specs_of

LENGTH, BATCH = 6, 2
RESET = np.stack([np.arange(LENGTH) == 2, np.arange(LENGTH) % 4 == 1], axis=1)
OTTT, ES_D_RTRL = ("ottt", {"decay": 0.7}), ("es_d_rtrl", {"decay_or_rank": 0.7})
MODELS = [
    pytest.param("TwoLayers", {"lower": ES_D_RTRL}, "batch axis", id="layers"),
    pytest.param(
        "LSTMSeparate",
        {"w_i": OTTT, ("w_f",): "immediate", lambda path: path == ("w_g",): ES_D_RTRL},
        "mapped",
        id="gates",
    ),
    pytest.param("Rotation", {"w_re": braintrace.ES_D_RTRL}, "batch axis", id="coupled states"),
    pytest.param("ALIFLateThreshold", {"w_in": OTTT}, "batch axis", id="late reads"),
    pytest.param("IndRNN", {"w_rec": OTTT}, "mapped", id="fan-out"),
]


def hashable(rule):
    """A rule, its options as a tuple of pairs."""
    return (rule[0], tuple(rule[1].items())) if isinstance(rule, tuple) else rule


def alone(rules, gradient_by):
    """The gradient of every weight, by a learner with the algorithm of that weight alone."""

    @functools.cache
    def of(rule):
        name, options = rule if isinstance(rule, tuple) else (rule, ())
        return gradient_by(name, **dict(options))

    expected = dict(of("d_rtrl"))
    for given, rule in rules.items():
        for path in expected:
            parts = tuple(path.split("/"))
            start = (given,) if isinstance(given, str) else given
            if given(parts) if callable(given) else parts[: len(start)] == start:
                expected[path] = of(hashable(rule))[path]
    return expected


class Convolution(brainstate.nn.Module):
    """A convolutional layer before a recurrent one, a weight of which is plain."""

    def __init__(self):
        super().__init__()
        self.conv = braintrace.nn.Conv1d((6, 2), 3, 3)
        self.cell = braintrace.nn.LeakyRNN(18, 4)
        self.readout = brainstate.nn.Linear(4, 2)

    def init_state(self, batch_size=None, **_):
        self.V = brainstate.HiddenState(jnp.zeros((batch_size, 6, 3)))

    def update(self, x):
        self.V.value = 0.7 * self.V.value + self.conv(x)
        return self.readout(self.cell(jnp.tanh(self.V.value).reshape(len(x), -1)))


def convolution(**options):
    brainstate.random.seed(3)
    x = jnp.ones((BATCH, 6, 2))
    return braintrace.compile(Convolution(), "d_rtrl", x, batch_size=BATCH, **options)


@pytest.mark.parametrize(
    ("elsewhere", "rules"), [("d_rtrl", {"w_out": "immediate"}), ("immediate", {"w": "d_rtrl"})]
)
def test_what_a_readout_filters_has_no_rule_without_filters(elsewhere, rules):
    net = {"batch_size": BATCH, "rules": rules}
    with pytest.raises(braintrace.CompilationError, match="'w_out' of the linear readout 'o'"):
        braintrace.compile(leaky(), elsewhere, jnp.ones((BATCH, 3)), **net)
    plain = braintrace.compile(
        leaky(), elsewhere, jnp.ones((BATCH, 3)), readout_filters=False, **net
    )
    assert not plain.graph.traced.readouts


@small({"h": (4,), "o": (2,)}, w=np.ones((3, 4)), w_out=np.ones((4, 2)))
def leaky(self, x):
    """A leaky layer with a leaky readout."""
    self.h.value = 0.9 * self.h.value + braintrace.matmul(x, self.w.value)
    read = braintrace.matmul(jnp.tanh(self.h.value), self.w_out.value)
    self.o.value = 0.8 * self.o.value + read
    return self.o.value


def pairs(gradients):
    for name, leaves in gradients.items():
        for index, leaf in enumerate(leaves):
            yield f"{name} {index}", np.asarray(leaf)


def test_traces_are_kept_apart_saved_and_cloned():
    case = catalogue.BY_NAME["Rotation"]
    xs, targets = map(np.asarray, case.sequences(BATCH, LENGTH))
    rules = {"w_re": "es_d_rtrl"}
    first, second = (build_learner(case, rules=rules) for _ in range(2))
    start = jax.tree.map(np.asarray, first.algorithm.traces.value)
    assert {key.split("/")[0] for key in start} == {"d_rtrl", "es_d_rtrl"}
    # Two states that are coupled are updated in place, under several rules as under one.
    assert len(first.algorithm.traces.pairs) > 0 or jax.default_backend() not in ("cpu", "gpu")
    specs = first.algorithm.compiled.trace_specs
    assert {spec.rule for spec in specs_of(specs)} == {"d_rtrl", "es_d_rtrl"}
    sequence_gradient(first, case, xs[:3], targets[:3])
    states, traces = jax.tree.map(np.asarray, snapshot(first))
    for path, state in second.algorithm.model.states().items():
        state.value = states[path]
    second.algorithm.traces.value = traces
    twins = [second, copy.deepcopy(first), brainstate.graph.clone(first)]
    found = [sequence_gradient(each, case, xs[3:], targets[3:]) for each in (first, *twins)]
    for other, twin in zip(found[1:], twins, strict=True):
        assert_gradients_close(other, found[0], 1e-6)
        assert_states_close(snapshot(twin), snapshot(first))
    others = build_learner(case, rules={"w_re": ("es_d_rtrl", {"decay_or_rank": 0.5})})
    with pytest.raises(braintrace.ShapeError, match=r"made with decay=0.5; .* has decay=0.9"):
        first.algorithm.traces.value = others.algorithm.traces.value
    first.reset_state()
    assert_same_bits(first.algorithm.traces.value, start)


def test_a_weight_without_a_past_is_told_and_has_no_trace():
    case = catalogue.BY_NAME["TwoLayers"]
    learner = build_learner(case, rules={"lower/w": "immediate"})
    assert [r.key for r in learner.graph.hidden_param_op_relations] == ["upper/w@mm1"]
    assert [d.paths for d in learner.graph.diagnostics if d.kind == "no-trace"] == [("lower/w",)]
    nothing = build_learner(case, "immediate", rules={"lower/w": "immediate"})
    assert snapshot(nothing)[1] == {}


def test_two_of_one_kind_and_the_check_of_a_gradient():
    case = catalogue.BY_NAME["TwoLayers"]
    rules = {"lower": ("es_d_rtrl", {"decay_or_rank": 0.5})}
    data = [*map(np.asarray, case.sequences(BATCH, LENGTH))]
    learner = build_learner(
        case, "es_d_rtrl", rules=rules, decay_or_rank=0.8, trace_dtype="bfloat16"
    )
    traces = learner.algorithm.traces.value
    assert {key.split("/")[0] for key in traces} == {"es_d_rtrl 1", "es_d_rtrl 2"}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(traces)} == {"bfloat16", "int32"}
    check = braintrace.gradient_check(
        case.build(), "es_d_rtrl", *data, case.loss, batch_size=BATCH, rules=rules
    )
    own = braintrace.gradient_check(
        case.build(), "es_d_rtrl", *data, case.loss, batch_size=BATCH, decay_or_rank=0.5
    )
    by_name = [{row.parameter: row.deviation for row in each.rows} for each in (check, own)]
    np.testing.assert_allclose(by_name[0]["lower/w"], by_name[1]["lower/w"], rtol=1e-4)
    assert abs(by_name[0]["upper/w"] - by_name[1]["upper/w"]) > 1e-3


EQUAL = {
    "both weights of a layer": ("d_rtrl", {"w": "es_d_rtrl", "b": braintrace.ES_D_RTRL}),
    "the default, given as an option": (
        "immediate",
        {"w": "es_d_rtrl", "b": ("es_d_rtrl", {"decay_or_rank": 0.9})},
    ),
    "the rule of the learner": ("es_d_rtrl", {"w": "ES_D_RTRL"}),
    "one for all states": ("rtrl", {"b": "rtrl"}),
    "one by layers": ("ostl_recurrent", {"w": "ostl_recurrent"}),
}


@small({"h": (4,)}, w=0.4 * np.sin(np.arange(12.0)).reshape(3, 4), b=0.1 * np.arange(4.0))
def biased(self, x):
    """A layer with a weight and a bias in one operation."""
    drive = braintrace.matmul(x, self.w.value, self.b.value)
    self.h.value = 0.7 * self.h.value + jnp.tanh(drive)
    return self.h.value


@pytest.mark.parametrize("given", ["the default, given as an option"])
def test_equal_rules_are_one(given):
    elsewhere, rules = EQUAL[given]
    alone = elsewhere if len(rules) == 1 else "es_d_rtrl"
    xs = np.float32(np.random.default_rng(0).normal(size=(LENGTH, BATCH, 3)))

    def run(algorithm, **options):
        learner = braintrace.compile(biased(), algorithm, xs[0], batch_size=BATCH, **options)
        resets = RESET[:, 0] if alone == "es_d_rtrl" else RESET
        how = {"step_fn": lambda x: (learner(x) ** 2).sum(), "chunk_size": 3}
        gradients = [learner.etrace_grad(xs, reset=flags, **how) for flags in (None, resets)]
        learner.reset_state()
        model = learner.algorithm.model
        sums = calls_gradient(model, lambda x: (learner(x) ** 2).sum(), xs)
        return learner, [*gradients, sums]

    learner, found = run(elsewhere, rules=rules)
    single, expected = run(alone)
    assert_same_bits(found, expected)
    if len(rules) == 1:
        assert learner.algorithm.rule == single.algorithm.rule
        learner.functional().restore(single.functional().state())


WRONG = {
    "a path of nothing": ({"w_inn": "d_rtrl"}, r"'w_inn', which matches no parameter.*'w_in'"),
    "no algorithm": ({"w_in": "d_rtl"}, r"`rules\['w_in'\]` is 'd_rtl'"),
    "options of all": (
        {"w_in": ("d_rtrl", {"strict": True})},
        r"has `strict`, which applies to all",
    ),
    "another kind": (
        {"w_in": "rtrl"},
        r"incompatible algorithms: RTRL \(full\), D_RTRL \(elementwise\)",
    ),
    "a diagonal": (
        {"w_in": "snap"},
        r"incompatible algorithms: SnAp \(diagonal\), D_RTRL \(elementwise\)",
    ),
}


@pytest.mark.parametrize(
    ("elsewhere", "rule", "kinds"),
    [
        ("rtrl", "uoro", r"UORO \(full\), RTRL \(full\)"),
        ("ostl_recurrent", "d_rtrl", r"D_RTRL \(elementwise\), OSTLRecurrent \(layered\)"),
        ("kf_rtrl", "immediate", r"Immediate \(none\), KF_RTRL \(full\)"),
        ("d_rtrl", ("snap", {"n": 2}), r"SnAp \(sparse\), D_RTRL \(elementwise\)"),
    ],
)
def test_rules_that_follow_the_state_across_positions_stand_alone(elsewhere, rule, kinds):
    """Their gradients go through the weights, all of which would have to be theirs."""
    with pytest.raises(braintrace.OptionError, match=f"incompatible algorithms: {kinds}"):
        build_learner(catalogue.BY_NAME["TanhRNN"], elsewhere, rules={"w_in": rule})


@pytest.mark.parametrize("wrong", WRONG)
def test_rules_that_do_not_fit_are_explained(wrong):
    rules, message = WRONG[wrong]
    with pytest.raises(braintrace.OptionError, match=message):
        build_learner(catalogue.BY_NAME["Leaky"], rules=rules)


def test_parameters_of_one_operation_have_one_rule():
    case = catalogue.BY_NAME["IndRNN"]
    with pytest.raises(braintrace.CompilationError, match=r"'w_in': es_d_rtrl, 'b_in': d_rtrl"):
        build_learner(case, rules={"w_in": "es_d_rtrl"})


def test_rules_of_the_diagonal_go_together():
    case = catalogue.BY_NAME["GRU"]
    with expected_warnings(case, "snap"):
        learner = braintrace.compile(
            case.build(),
            "snap",
            case.sequences(2, 1)[0][0],
            batch_size=2,
            rules={"w_z": "immediate"},
        )
    found = sequence_gradient(learner, case, *case.sequences(2, 6))
    expected = sequence_gradient(build_learner(case, "snap"), case, *case.sequences(2, 6))
    now = sequence_gradient(build_learner(case, "immediate"), case, *case.sequences(2, 6))
    assert_gradients_close(found, {**expected, "w_z": now["w_z"]}, 1e-5)
