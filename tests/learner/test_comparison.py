"""`compare_rules` and `gradient_check` agree with plain JAX, and change nothing of the caller."""

import functools
import json

import brainstate
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
import random_models
import saiunit as u
from learners import (
    LEAKY,
    LSTM,
    TARGETS,
    XS,
    assert_same,
    expected_gradient,
    learner_of,
    squared_error,
    state_of,
    step_of,
)
from random_models import BATCH, INPUTS, STEPS, Marked, model_of

import braintrace

matplotlib.use("agg")
pytestmark = pytest.mark.usefixtures("float64")


def loss_of(model, step):
    return squared_error(model(step[0]), step[1])


def compared(model, xs=(XS, TARGETS), step_fn=loss_of, **options):
    given = {"batch_size": BATCH, "windows": [None], "repeats": 1, "progress": False}
    return braintrace.compare_rules(model, xs, step_fn=step_fn, **{**given, **options})


@functools.cache
def table():
    rules = ["d_rtrl", "rtrl", "rflo", ("es_d_rtrl", {"decay_or_rank": 0.7})]
    return compared(model_of(LSTM), rules=rules, windows=[None, STEPS])


def by_key(comparison):
    return {(row.rule.partition("(")[0], row.window): row for row in comparison.rows}


def direction(found, exact):
    """The cosine and the relative error of one gradient with respect to another."""
    found, exact = (np.concatenate([np.ravel(g[k]) for k in exact]) for g in (found, exact))
    cosine = found @ exact / np.linalg.norm(found) / np.linalg.norm(exact)
    return cosine, np.linalg.norm(found - exact) / np.linalg.norm(exact)


# --- the numbers


@pytest.mark.core
def test_rows_are_gradients_in_plain_jax():
    row, exact = by_key(table())["D_RTRL", None], expected_gradient(LSTM, "bptt")
    online = expected_gradient(LSTM, "d_rtrl")
    assert row.deviation > 1e-3
    np.testing.assert_allclose((row.cosine, row.deviation), direction(online, exact))
    *parameters, together = row.gradient.rows
    for own in parameters:
        name = own.parameter
        wanted = direction({name: online[name]}, {name: exact[name]})
        np.testing.assert_allclose((own.cosine, own.deviation), wanted, atol=1e-9)
        norms = [np.linalg.norm(g[name]) / STEPS for g in (online, exact)]
        np.testing.assert_allclose((own.norm, own.bptt_norm), norms)
    np.testing.assert_allclose(together.norm**2, sum(own.norm**2 for own in parameters))


def test_exact_rules_and_windows_over_everything_are_exact():
    rows = by_key(table())
    for key in (("D_RTRL", STEPS), ("ES_D_RTRL", STEPS), ("RTRL", None), ("RTRL", STEPS)):
        assert rows[key].deviation < 1e-9
    assert rows["ES_D_RTRL", None].deviation > 1e-3


def test_every_row_has_its_costs():
    found, rows = table(), by_key(table())
    for row in (found.bptt, found.checkpointed, rows["D_RTRL", None], rows["RTRL", None]):
        assert row.seconds > 0
        assert row.temp > 0
    assert found.bptt.traces == found.checkpointed.traces == 0
    assert found.checkpointed.deviation < 1e-12
    assert rows["D_RTRL", None].traces == learner_of(LSTM).report().carried_bytes


def test_a_refused_rule_is_a_row_with_the_reason():
    row = by_key(table())["RFLO", None]
    assert "feedback" in row.refused
    assert row.gradient is None
    assert np.isnan([row.cosine, row.deviation, row.seconds]).all()
    assert str(table()).count("RFLO is refused") == 1


def test_a_rule_without_its_options_is_a_row_with_the_reason():
    xs = XS, TARGETS
    found = compared(model_of(LSTM), xs, rules=["ottt", "immediate"], windows=[None], repeats=1)
    ottt, immediate = found.rows
    assert "decay" in ottt.refused
    assert '("ottt", {"option": ...})' in ottt.refused
    assert ottt.gradient is None
    assert immediate.refused is None


def test_a_check_of_one_rule_is_its_row():
    options = {"batch_size": BATCH, "decay_or_rank": 0.7}
    check = braintrace.gradient_check(
        model_of(LSTM), "es_d_rtrl", XS, TARGETS, squared_error, **options
    )
    expected = by_key(table())["ES_D_RTRL", None].gradient
    assert check.steps == expected.steps == STEPS
    pairs = zip(check.rows, expected.rows, strict=True)
    for own, wanted in pairs:
        assert own.parameter == wanted.parameter in str(check)
        np.testing.assert_allclose((own.deviation, own.cosine), (wanted.deviation, wanted.cosine))
    data = json.loads(json.dumps(check.to_dict()))
    assert data["rows"][0]["deviation"] == check.rows[0].deviation


def test_a_check_takes_several_inputs():
    def step(p, h, x, gate):
        h = jax.nn.sigmoid(gate) * h + x @ p["w"]
        return h, h

    model = braintrace.from_function(step, {"w": jnp.ones((INPUTS, 2))}, jnp.zeros((BATCH, 2)))
    inputs = XS, XS[..., :1]
    check = braintrace.gradient_check(
        model, "d_rtrl", inputs, TARGETS, squared_error, batch_size=BATCH
    )
    assert check.rows[-1].deviation < 1e-9


# --- rules, windows and sequences


def test_rules_are_names_classes_and_pairs_with_options():
    rules = (braintrace.Immediate, ("ottt", {"decay": 0.5}), ("ottt", {"decay": 0.7}))
    rows = compared(model_of(LSTM), rules=rules).rows
    assert [row.rule for row in rows] == ["Immediate", "OTTT(decay=0.5)", "OTTT(decay=0.7)"]
    assert len({row.cosine for row in rows}) == 3


def test_without_rules_an_exact_one_is_among_them():
    """And without a loss, that of the mean squares; windows are shares of the sequence."""
    xs = np.concatenate([XS, XS])[:8]
    found = compared(model_of(LSTM), xs, step_fn=None, windows=None)
    assert [row.window for row in found.rows[:2]] == [None, 2]
    names = ["D_RTRL", "ES_D_RTRL", "Immediate", "RTRL"]
    assert [*dict.fromkeys(row.rule for row in found.rows)] == names
    assert by_key(found)["RTRL", None].deviation < 1e-9


class Noisy(random_models.Module):
    """A model that starts from noise and adds noise."""

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.h0.value = self.h0.value + brainstate.random.normal(
            size=self.h0.value.shape, dtype=float
        )

    def update(self, x):
        return super().update(x + brainstate.random.normal(size=x.shape, dtype=float))


@pytest.mark.parametrize("vmap", [False, True])
def test_noise_is_the_same_for_all(vmap):
    model = Noisy(LEAKY, Marked(), np.float64)
    options = {"vmap": True} if vmap else {"batch_size": BATCH}
    check = braintrace.gradient_check(model, "d_rtrl", XS, TARGETS, squared_error, **options)
    assert check.rows[-1].deviation < 1e-9
    assert check.rows[-1].norm > 0


class Membrane(random_models.Module):
    """A membrane in millivolts."""

    def update(self, x):
        return super().update(x) * u.mV


def test_units_masks_and_padding():
    """Targets without a value and padding are NaN; a mask of samples is data of the loss."""
    xs, targets, mask = XS.copy(), TARGETS.copy(), np.array([1, 1, 1, 0, 2, 0])
    targets[3], xs[5] = np.nan, np.nan
    are_valid = np.array([[1, 1], [0, 1], [1, 0], [0, 0], [1, 1], [0, 0]], float)

    def step_fn(model, step):
        x, target, is_valid = step
        return jnp.sum(is_valid[:, None] * ((model(x) - target * u.mV) / u.mV) ** 2)

    model = Membrane(LEAKY, Marked(), np.float64)
    options = {"rules": ["d_rtrl"], "step_fn": step_fn, "mask": mask}
    found = compared(model, (xs, targets, are_valid), **options).rows[0].gradient.rows[-1]
    assert found.deviation < 1e-9
    learner = learner_of()
    options = {"step_fn": lambda *step: step_fn(lambda x: learner(x) * u.mV, step), "mask": mask}
    gradients = learner.etrace_grad(xs, targets, are_valid, **options)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in gradients.values()))
    np.testing.assert_allclose(found.bptt_norm, norm)


def test_memory_shortens_the_sequence_and_refuses_rules():
    xs = np.concatenate([XS] * 4), np.concatenate([TARGETS] * 4)
    options = {"rules": ["immediate"], "mask": np.arange(24) % 2}
    whole = compared(model_of(LSTM), xs, **options)
    budget = whole.bptt.temp // 2
    found = compared(model_of(LSTM), xs, **options, memory_budget=budget)
    assert found.length == whole.length == whole.steps == 24
    assert 1 <= found.steps < 24
    assert found.bptt.temp <= budget == found.memory_budget
    assert str(found.steps) in str(found)
    for row in found.rows:
        assert (row.refused is None) == (row.seconds > 0)
        assert row.refused is not None or row.temp <= budget


# --- the model, its learners and the keys stay as they are


class StoppedError(Exception):
    """Raised in the middle of a comparison."""


@pytest.mark.parametrize(("error", "calls"), [(None, 0), (StoppedError, 1), (KeyboardInterrupt, 3)])
def test_nothing_changes(error, calls):
    learner, counter, count = learner_of(LSTM), brainstate.LongTermState(jnp.zeros(())), []
    learner.etrace_evolve(XS)
    states = list(learner.module.states().values())

    def now():
        return state_of(learner), counter.value

    def step_fn(model, step):
        count.append(model)
        if error is not None and len(count) == calls:
            raise error
        counter.value += brainstate.random.normal()
        return loss_of(model, step) + 0 * counter.value

    before = now()
    if error is None:
        compared(learner.module, rules=["d_rtrl"], step_fn=step_fn)
    else:
        with pytest.raises(error):
            compared(learner.module, rules=["d_rtrl"], step_fn=step_fn)
    assert_same(now(), before, 0)
    after = learner.module.states().values()
    assert all(one is other for one, other in zip(after, states, strict=True))
    learner.etrace_grad(XS, TARGETS, step_fn=step_of(learner))  # its traces belong to its states


def test_a_step_function_calls_its_argument():
    model = model_of(LSTM)
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    with pytest.raises(braintrace.OptionError, match="0 times"):
        compared(model, step_fn=lambda _, step: loss_of(model, step))


def test_a_loss_without_a_gradient_is_refused():
    with pytest.raises(braintrace.OptionError, match="zero"):
        braintrace.gradient_check(
            model_of(LEAKY), "d_rtrl", XS, TARGETS, lambda y, _: 0.0 * y.sum(), batch_size=BATCH
        )


# --- the table


def test_it_is_printed_as_data_and_drawn():
    found, text = table(), str(table())
    for word in ("BPTT", "D_RTRL", "RTRL", "refused", "w0"):
        assert word in text
    data = json.loads(json.dumps(found.to_dict()))
    assert data["steps"] == data["length"] == STEPS
    assert data["rows"][0]["cosine"] == found.rows[0].cosine
    assert data["bptt"]["seconds"] == found.bptt.seconds
    ax = found.plot()
    lines = {line.get_label(): line.get_xydata() for line in ax.get_lines()}
    assert {"BPTT", "D_RTRL", "RTRL"} <= {*lines}
    rows = [row for row in found.rows if row.rule == "D_RTRL"]
    points = sorted((row.temp + row.traces, row.cosine) for row in rows)
    np.testing.assert_allclose(lines["D_RTRL"], points)
    assert found.plot(ax) is ax


def test_progress_is_shown(capsys):
    compared(model_of(LEAKY), rules=["immediate"], progress=True)
    assert "3/3" in capsys.readouterr().err


def test_a_weight_without_a_gradient_is_printed_as_such():
    """Its cosine is no number, and the one of all parameters is not 1."""

    class Late(brainstate.nn.Module):
        """A weight that reaches the output a step later, and a readout of a thousand times more."""

        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(1e-3 * jnp.ones((INPUTS, 2)))
            self.out = brainstate.ParamState(jnp.ones(2))

        def init_state(self, batch_size=None, **_):
            self.h = brainstate.HiddenState(jnp.zeros((batch_size, 2)))

        def update(self, x):
            late = 1e3 + self.h.value
            self.h.value = braintrace.matmul(x, self.w.value)
            return late * self.out.value

    found = compared(Late(), XS, lambda model, x: model(x).sum(), rules=["immediate"])
    printed = str(found)
    assert found.rows[0].gradient.rows[1].norm == 0
    assert "no gradient" in printed and "<1.0000" in printed and "nan" not in printed
