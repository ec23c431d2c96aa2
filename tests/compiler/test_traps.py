"""What models get wrong, and what looks wrong but is not: loops, branches, stale states."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backpropagation import of_squares
from jax.experimental import io_callback
from matrices import normal

import braintrace

INPUTS = normal(0, 5, 2, 3)


class Cell(brainstate.nn.Module):
    """A weight, a state, and a step that a test fills in."""

    def __init__(self, step):
        super().__init__()
        self.step = step
        self.w = brainstate.ParamState(normal(1, 3, 4) / 2)
        self.u = brainstate.ParamState(normal(2, 4, 4) / 2)

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        self.step(self, x)
        return self.h.value


def compiled(step, **options):
    return braintrace.compile(Cell(step), "d_rtrl", INPUTS[0], batch_size=2, **options)


def gradient(learner):
    found = learner.etrace_grad(
        INPUTS, step_fn=lambda x: jnp.sum(learner(x) ** 2), reduction="sum", chunk_size=2
    )
    return np.asarray(found[("w",)])


def backpropagated(step):
    return np.asarray(of_squares(Cell(step), INPUTS, batch_size=2)[("w",)])


def leak(cell, x):
    cell.h.value = 0.9 * cell.h.value + jnp.tanh(braintrace.matmul(x, cell.w.value))


# --- refused ------------------------------------------------------------------------------


def write_in_raw_scan(cell, x):
    jax.lax.scan(lambda carry, _: (carry, leak(cell, x)), 0, None, length=2)


def write_in_raw_cond(cell, x):
    jax.lax.cond(x.sum() > 0, lambda: leak(cell, x), lambda: None)


def weight_in_while_loop(cell, x):
    def body(carry):
        return carry[0] + 1, 0.9 * carry[1] + braintrace.matmul(x, cell.w.value)

    cell.h.value = jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, cell.h.value))[1]


def integrator_of_unknown_length(cell, x):
    drive = jnp.tanh(braintrace.matmul(x, cell.w.value))

    def body(carry):
        return carry[0] + 1, carry[1] + 0.1 * (drive - carry[1])

    cell.h.value = jax.lax.while_loop(lambda carry: carry[0] < 4, body, (0, cell.h.value))[1]


def answer_of_a_callback(cell, x):
    answer = io_callback(lambda: np.float32(0.5), jax.ShapeDtypeStruct((), np.float32))
    cell.h.value = answer * cell.h.value + braintrace.matmul(x, cell.w.value)


def long_loop_with_a_weight(cell, x):
    brainstate.transform.for_loop(lambda _: leak(cell, x), jnp.arange(40))


@pytest.mark.core
@pytest.mark.parametrize(
    ("step", "words"),
    [
        (write_in_raw_scan, r"brainstate\.transform"),
        (write_in_raw_cond, r"brainstate\.transform"),
        (weight_in_while_loop, "while.*test_traps.py"),
        (integrator_of_unknown_length, r"while.*test_traps.py.*loop of known length"),
        (answer_of_a_callback, r"io_callback.*test_traps.py"),
        (long_loop_with_a_weight, "40 steps.*unroll_limit.*test_traps.py"),
    ],
)
def test_refused_with_what_to_do(step, words):
    with pytest.raises(braintrace.CompilationError, match=words):
        compiled(step)


def plain_recurrence(cell, x):
    cell.h.value = jnp.tanh(braintrace.matmul(x, cell.w.value) + cell.h.value @ cell.u.value)


def rolled(cell, x):
    cell.h.value = 0.5 * jnp.roll(cell.h.value, 1, axis=-1) + braintrace.matmul(x, cell.w.value)


@pytest.mark.parametrize(
    ("step", "kinds"),
    [(plain_recurrence, ["truncated", "not-marked"]), (rolled, ["truncated"])],
)
def test_mixing_warns_once_with_path_and_line_and_strict_refuses_it(step, kinds):
    with pytest.warns(braintrace.ApproximationWarning, match=r"'h'.*test_traps.py") as caught:
        learner = compiled(step)
    assert len(caught) == len(kinds)
    assert [d.kind for d in learner.graph.diagnostics if d.level == "warning"] == kinds
    with pytest.raises(braintrace.CompilationError, match="'h'"):
        compiled(step, strict=True)


# --- followed -----------------------------------------------------------------------------


def test_a_longer_loop_is_unrolled_on_request():
    learner = compiled(long_loop_with_a_weight, unroll_limit=40)
    assert len(learner.graph.hidden_param_op_relations) == 40


def leak_beside_loops_of_no_steps(cell, x):
    def coupled(h, _):
        return h + jnp.roll(h, 1, -1), h

    def driven(h, k):
        return 0.5 * h + braintrace.matmul(x, cell.w.value), k * h

    cell.h.value, _ = jax.lax.scan(coupled, cell.h.value, None, length=0)
    cell.h.value, empty = jax.lax.scan(driven, cell.h.value, jnp.zeros(0))
    leak(cell, x + empty.sum())


def test_a_loop_of_no_steps_changes_nothing():
    learner = compiled(leak_beside_loops_of_no_steps)
    np.testing.assert_allclose(gradient(learner), backpropagated(leak), rtol=1e-5, atol=1e-6)


def test_a_print_inside_the_step_happens_once(capfd):
    def chatty(cell, x):
        leak(cell, x)
        jax.debug.print("step of {}", x.shape[0])

    learner = compiled(chatty)
    jax.block_until_ready(learner(INPUTS[0]))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("step of 2") == 1


class OneNumber(brainstate.nn.Module):
    """A hidden state without axes, fed by an output that has one."""

    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.asarray([[0.5], [-0.3], [0.8]]))

    def init_state(self, batch_size=None, **kwargs):
        self.h = brainstate.HiddenState(jnp.zeros(()))

    def update(self, x):
        y = braintrace.matmul(x, self.w.value).reshape(())
        self.h.value = 0.8 * self.h.value + jnp.tanh(y)
        return self.h.value


def test_a_state_without_axes():
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)

    def total(w):
        h, value = 0.0, 0.0
        for x in xs:
            h = 0.8 * h + jnp.tanh((x @ w)[0])
            value = value + h**2
        return value

    learner = braintrace.compile(OneNumber(), "d_rtrl", xs[0])
    expected = jax.grad(total)(learner.algorithm.model.w.value)
    for chunk_size in (1, 3, 5):
        learner.reset_state()
        (found,) = learner.etrace_grad(
            xs, step_fn=lambda x: learner(x) ** 2, reduction="sum", chunk_size=chunk_size
        ).values()
        np.testing.assert_allclose(found, expected, rtol=1e-5)
