"""`compare_rules` agrees with gradients in plain JAX, and changes nothing of the caller."""

import dataclasses
import functools
import json
import sys

import brainstate
import catalogue
import drivers
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pandas
import pytest
import references
import saiunit as u
from assertions import assert_same_bits
from models import Noisy

import braintrace
from braintrace._comparison.check import compared as of_gradients
from braintrace._comparison.compare import _windows
from braintrace._learner.driver import lower_call

matplotlib.use("agg")
DIAGONAL, RECURRENT = catalogue.BY_NAME["Leaky"], catalogue.BY_NAME["LeakyRNN"]
LENGTH, BATCH = 6, 2
LEAK = 0.8


def compared(model, xs, **options):
    given = {"batch_size": BATCH, "windows": [None], "repeats": 1, "progress": False}
    return braintrace.compare_rules(model, xs, **{**given, **options})


def loss_of(case):
    return lambda model, step: case.loss(model(step[0]), step[1])


@functools.cache
def table(case, rules, windows, **options):
    xs = case.sequences(BATCH, LENGTH)
    given = {"rules": list(rules), "windows": list(windows), "step_fn": loss_of(case)}
    return compared(case.build(), xs, **given, **options)


def by_key(comparison):
    return {(row.rule, row.window): row for row in comparison.rows}


def direction(found, exact):
    """Return the cosine and the relative error of one gradient with respect to another."""
    found, exact = (np.concatenate([np.ravel(g[k]) for k in exact]) for g in (found, exact))
    cosine = found @ exact / np.linalg.norm(found) / np.linalg.norm(exact)
    return cosine, np.linalg.norm(found - exact) / np.linalg.norm(exact)


MAIN = (RECURRENT, ("d_rtrl", "rtrl", "rflo"), (None, LENGTH))


def test_rows_are_those_of_gradients_in_plain_jax():
    row = by_key(table(*MAIN))["D_RTRL", None]
    online, exact = references.dense_d_rtrl(RECURRENT), references.bptt(RECURRENT)
    assert row.deviation > 1e-3
    np.testing.assert_allclose((row.cosine, row.deviation), direction(online, exact), atol=1e-5)
    for parameter in row.gradient.rows[:-1]:
        name = parameter.parameter
        wanted = direction({name: online[name]}, {name: exact[name]})
        np.testing.assert_allclose((parameter.cosine, parameter.deviation), wanted, atol=1e-5)
        np.testing.assert_allclose(
            parameter.bptt_norm, np.linalg.norm(exact[name]) / LENGTH, rtol=1e-5
        )


def test_exact_rules_and_windows_over_everything_are_exact():
    rows = by_key(table(*MAIN))
    for key in (("D_RTRL", LENGTH), ("RTRL", None), ("RTRL", LENGTH)):
        assert rows[key].deviation < 1e-5
        np.testing.assert_allclose(rows[key].cosine, 1, atol=1e-6)
    assert table(DIAGONAL, ("d_rtrl",), (None,)).rows[0].deviation < 1e-5


def test_every_row_has_its_costs():
    found = table(*MAIN)
    rows = by_key(found)
    for row in (found.bptt, rows["D_RTRL", None], rows["RTRL", None]):
        assert row.seconds > 0
        assert row.temp > 0
    assert found.bptt.traces == 0
    learner = drivers.build_learner(RECURRENT, "d_rtrl")
    assert rows["D_RTRL", None].traces == learner.report().carried_bytes
    xs, step_fn = RECURRENT.sequences(BATCH, LENGTH), loss_of(RECURRENT)
    program = lower_call(learner, "etrace_grad", xs, step_fn=lambda step: step_fn(learner, step))
    assert rows["D_RTRL", None].temp == program.compile().memory_analysis().temp_size_in_bytes


def test_tables_are_sequences():
    rows, model = DIAGONAL.sequences(None, 4)[0], DIAGONAL.build()
    rows = np.asarray(rows)
    found, expected = (
        compared(model, xs, rules=["immediate"], batch_size=None).rows[0].gradient
        for xs in (pandas.DataFrame(rows), rows)
    )
    assert found == expected


def test_tables_are_inputs_and_targets_of_a_check():
    brainstate.random.seed(2)  # both units are active
    rows = pandas.DataFrame(np.ones((4, 2), np.float32))
    model = braintrace.nn.IndRNN(2, 2)
    check = braintrace.gradient_check(
        model, "d_rtrl", rows, rows, lambda output, y: ((output - y) ** 2).mean()
    )
    assert check.rows[-1].deviation < 1e-5


def test_refused_rules_are_rows_with_the_reason():
    found = table(*MAIN)
    for window in (None, LENGTH):
        row = by_key(found)["RFLO", window]
        assert "sends errors back through the feedback" in row.refused
        assert row.gradient is None
        assert np.isnan([row.cosine, row.deviation, row.seconds]).all()
    assert str(found).count("RFLO is refused") == 1


def test_the_check_of_a_gradient_is_a_row():
    xs, ys = RECURRENT.sequences(BATCH, LENGTH)
    check = braintrace.gradient_check(
        RECURRENT.build(), "d_rtrl", xs, ys, RECURRENT.loss, batch_size=BATCH
    )
    assert check == by_key(table(*MAIN))["D_RTRL", None].gradient


def test_rules_are_names_classes_instances_and_pairs():
    rules = (braintrace.Immediate, ("ottt", {"decay": 0.5}), ("ottt", {"decay": 0.7}))
    xs = RECURRENT.sequences(BATCH, LENGTH)
    found = compared(RECURRENT.build(), xs, rules=rules, step_fn=loss_of(RECURRENT))
    names = [row.rule for row in found.rows]
    assert names == ["Immediate", "OTTT(decay=0.5)", "OTTT(decay=0.7)"]
    assert len({row.cosine for row in found.rows}) == 3


def test_default_rules_include_an_exact_one():
    """Without a loss and without rules: `RTRL` is exact on a recurrent network."""
    xs, _ = map(np.asarray, RECURRENT.sequences(BATCH, 32))
    found = braintrace.compare_rules(
        RECURRENT.build(), xs, batch_size=BATCH, windows=[None], repeats=1, progress=False
    )
    assert [row.rule for row in found.rows] == ["D_RTRL", "ES_D_RTRL", "Immediate", "RTRL"]
    assert found.rows[-1].deviation < 1e-5
    model = RECURRENT.build()
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    weights, start = model.states(brainstate.ParamState), model.h.value

    def total():
        model.h.value = start
        return brainstate.transform.for_loop(lambda x: jnp.mean(model(x) ** 2), xs).mean()

    gradient = brainstate.transform.jit(brainstate.transform.grad(total, weights))
    exact = jax.tree.leaves(gradient())
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in exact))
    np.testing.assert_allclose(found.bptt.gradient.rows[-1].norm, norm, rtol=1e-5)


def test_default_windows_are_shares_of_the_sequence():
    assert _windows(None, 64) == [None, 4, 16]
    assert _windows(None, 8) == [None, 2]
    assert _windows(None, 1) == [None]


# --- models, data and losses of all kinds


def test_mapped_models_draw_the_same_noise():
    xs, _ = RECURRENT.sequences(BATCH, LENGTH)
    options = {"batch_size": None, "vmap": True, "rules": ["d_rtrl"]}
    found = compared(Noisy(), xs, step_fn=lambda model, x: (model(x) ** 2).sum(), **options)
    assert found.rows[0].deviation < 1e-5


class Membrane(brainstate.nn.Module):
    """A membrane in millivolts, driven by a weight in millivolts."""

    def __init__(self):
        super().__init__()
        w = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
        self.w = brainstate.ParamState(jnp.asarray(w) * u.mV)

    def init_state(self, batch_size=None):
        self.V = brainstate.HiddenState(jnp.zeros((batch_size, 4)) * u.mV)

    def update(self, x):
        self.V.value = LEAK * self.V.value + braintrace.matmul(x, self.w.value)
        return self.V.value


def test_units_masks_and_padding():
    """Targets without a value and padding are NaN; a mask of samples is data of the loss."""
    xs, _ = map(np.array, RECURRENT.sequences(BATCH, LENGTH))
    ys = np.ones((LENGTH, BATCH), np.float32)
    are_valid = np.array([[1, 1], [0, 1], [1, 0], [0, 0], [1, 1], [0, 0]], np.float32)
    mask = np.array([1, 1, 1, 0, 2, 0])
    exact_xs, ys[3] = xs.copy(), np.nan
    xs[5] = np.nan

    def step_fn(model, step):
        x, y, is_valid = step
        error = model(x).sum(axis=-1) - y * u.mV
        return (is_valid * error**2).sum()

    found = compared(
        Membrane(), (xs, ys, are_valid), step_fn=step_fn, mask=mask, rules=["d_rtrl"], windows=[2]
    )

    def total(w):
        V, losses = jnp.zeros((BATCH, 4)), 0.0
        for x, is_valid, weight in zip(exact_xs, are_valid, mask, strict=True):
            V = LEAK * V + x @ w
            losses += weight * (is_valid * (V.sum(axis=-1) - 1) ** 2).sum() / mask.sum()
        return losses

    exact = jax.jit(jax.grad(total))(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4))
    row = found.rows[0].gradient.rows[0]
    assert row.deviation < 1e-5
    np.testing.assert_allclose(row.bptt_norm, np.linalg.norm(exact), rtol=1e-5)


def test_complex_gradients_have_two_numbers():
    exact, online = {("w",): np.array([1 + 1j])}, {("w",): np.array([1 - 1j])}
    row = of_gradients("rule", 1, online, exact).rows[0]
    np.testing.assert_allclose((row.cosine, row.deviation), (0, np.sqrt(2)), atol=1e-12)


def test_a_long_sequence_is_cut():
    xs = tuple(map(np.asarray, RECURRENT.sequences(BATCH, 64)))
    options = {"rules": ["immediate"], "step_fn": loss_of(RECURRENT)}
    whole = compared(RECURRENT.build(), xs, **options, mask=np.arange(64) % 2)
    budget = whole.bptt.temp // 4
    found = compared(RECURRENT.build(), xs, **options, mask=np.arange(64) % 2, memory_budget=budget)
    assert found.length == whole.length == whole.steps == 64
    assert 1 <= found.steps < 32
    assert found.bptt.temp <= budget
    said = " ".join(str(found).split())
    assert f"sequence of 64 steps is shortened to its first {found.steps}" in said
    assert "is cut" not in str(whole)
    assert found.rows[0].refused is not None or found.rows[0].temp <= budget
    part = jax.tree.map(lambda leaf: leaf[: found.steps], xs)
    alone = compared(RECURRENT.build(), part, **options, mask=np.arange(found.steps) % 2)
    assert alone.bptt.gradient == found.bptt.gradient


def test_a_rule_that_needs_too_much_memory_is_refused():
    xs = RECURRENT.sequences(BATCH, 2)
    few = compared(RECURRENT.build(), xs, rules=["immediate"], step_fn=loss_of(RECURRENT))
    found = compared(
        RECURRENT.build(),
        xs,
        rules=["rtrl"],
        step_fn=loss_of(RECURRENT),
        memory_budget=few.bptt.temp + 100,
    )
    assert "more than `memory_budget`" in found.rows[0].refused


# --- the model, its learners and the keys stay as they are


class StoppedError(Exception):
    """Raised in the middle of a comparison."""


def setting():
    """Return a model with a learner in the middle of a sequence, and all that could change."""
    learner = drivers.build_learner(RECURRENT, "d_rtrl")
    xs, targets = RECURRENT.sequences(BATCH, LENGTH)
    drivers.sequence_gradient(learner, RECURRENT, xs, targets)
    counter = brainstate.LongTermState(jnp.zeros(()))

    def now():
        key = jax.random.key_data(brainstate.random.DEFAULT.value)
        return jax.tree.map(np.asarray, (drivers.snapshot(learner), key, counter.value))

    return learner, counter, now, (xs, targets)


ENDS = [
    (None, 0),
    (StoppedError, 1),
    (StoppedError, 3),
    (KeyboardInterrupt, 2),
    (KeyboardInterrupt, 3),
]


@pytest.mark.parametrize(("error", "calls"), [(None, 0), (StoppedError, 1), (KeyboardInterrupt, 3)])
def test_nothing_changes(error, calls):
    """Also if a step function or Ctrl-C ends it, in the first trace or in the trace of a rule."""
    learner, counter, now, data = setting()
    states = list(learner.algorithm.model.states().values())
    before, count = now(), []

    def step_fn(model, step):
        count.append(model)
        if error is not None and len(count) == calls:
            raise error
        counter.value += brainstate.random.normal()
        return RECURRENT.loss(model(step[0]), step[1]) + 0 * counter.value

    def run():
        return compared(learner.algorithm.model, data, rules=["d_rtrl"], step_fn=step_fn)

    if error is None:
        run()
    else:
        with pytest.raises(error):
            run()
    assert_same_bits(now(), before)
    after = list(learner.algorithm.model.states().values())
    assert all(one is other for one, other in zip(after, states, strict=True))
    drivers.sequence_gradient(learner, RECURRENT, *data)  # its traces belong to its states


# --- arguments


XS = RECURRENT.sequences(BATCH, LENGTH)


def test_the_original_in_the_place_of_the_argument_is_refused():
    model = RECURRENT.build()
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    before = jax.tree.map(np.asarray, {p: s.value for p, s in model.states().items()})
    with pytest.raises(braintrace.OptionError, match="called the model 0 times"):
        compared(model, XS, step_fn=lambda _, step: RECURRENT.loss(model(step[0]), step[1]))
    assert_same_bits({p: s.value for p, s in model.states().items()}, before)
    own = model.update
    model.update = lambda x: own(x)
    with pytest.raises(braintrace.OptionError, match="of the original"):
        compared(model, XS, step_fn=loss_of(RECURRENT))


# --- the table


def test_it_is_printed():
    text = str(table(*MAIN))
    for word in ("BPTT", "D_RTRL", "RTRL", "refused", "w_rec", "Cosine of each parameter"):
        assert word in text


def test_as_data_and_a_plot():
    found = table(*MAIN)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["steps"] == data["length"] == LENGTH
    first = data["rows"][0]
    assert (first["rule"], first["window"]) == ("D_RTRL", None)
    assert first["cosine"] == found.rows[0].cosine
    assert first["gradient"]["rows"][0]["parameter"] == "bias"
    assert data["bptt"]["seconds"] == found.bptt.seconds
    ax = found.plot()
    lines = {line.get_label(): line.get_xydata() for line in ax.get_lines()}
    assert set(lines) == {"BPTT", "D_RTRL", "RTRL"}
    points = sorted((row.temp + row.traces, row.cosine) for row in found.rows[:2])
    np.testing.assert_allclose(lines["D_RTRL"], points)
    assert found.plot(ax) is ax


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        table(*MAIN).steps = 3


def test_progress_names_each_rule_and_window(monkeypatch):
    bars = []

    class Bar:
        def __init__(self, total, **_):
            self.total, self.count, self.is_closed = total, 0, False
            bars.append(self)

        def update(self):
            self.count += 1

        def close(self):
            self.is_closed = True

    module = type(sys)("tqdm.auto")
    module.tqdm = Bar
    monkeypatch.setitem(sys.modules, "tqdm.auto", module)
    options = {"rules": ["immediate", "rflo"], "step_fn": loss_of(RECURRENT)}
    compared(RECURRENT.build(), XS, **options, repeats=2, progress=True)
    (bar,) = bars
    assert bar.count == bar.total == 5
    assert bar.is_closed
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert compared(RECURRENT.build(), XS, **options, progress=True).rows[0].seconds > 0
