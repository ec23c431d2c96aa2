"""A call that is watched does what it does unwatched, tells of it, and ends where it is told to."""

import os
import signal
import sys

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from assertions import assert_same_bits
from drivers import build_learner, new_learner, snapshot

import braintrace
from braintrace._learner.watching import blocks_of

CASE, BATCH, LENGTH = catalogue.BY_NAME["Leaky"], 2, 40
XS, YS = map(np.asarray, CASE.sequences(BATCH, LENGTH))
MASK = np.arange(LENGTH) % 3 != 0


def drivers(learner):
    def step_fn(x, y):
        return CASE.loss(learner(x), y)

    def with_aux(x, y):
        loss = step_fn(x, y)
        return loss, {"twice": 2 * loss}

    learning = {"step_fn": step_fn, "optimizer": optax.adam(0.01)}
    pair = {"return_value": True, "has_aux": True, "step_fn": with_aux}
    return {
        "etrace_grad": lambda **more: learner.etrace_grad(XS, YS, step_fn=step_fn, **more),
        "etrace_grad, masked sum": lambda **more: learner.etrace_grad(
            XS, YS, mask=MASK, reduction="sum", **pair, **more
        ),
        "etrace_grad, masked mean": lambda **more: learner.etrace_grad(
            XS, YS, mask=MASK, **pair, **more
        ),
        "etrace_online": lambda **more: learner.etrace_online(XS, YS, **learning, **more),
        "etrace_online, blocks": lambda **more: learner.etrace_online(
            XS, YS, **{**learning, "step_fn": with_aux}, every=5, mask=MASK, has_aux=True, **more
        ),
        "etrace_evolve": lambda **more: learner.etrace_evolve(XS, **more),
        "predict": lambda **more: learner.predict(XS, **more),
    }


@pytest.mark.parametrize(
    ("steps", "unit", "log_every"),
    [(1, 1, None), (40, 1, None), (41, 1, None), (10_000, 1, None), (10_007, 1, None),
     (100_000, 1, 1000), (100_000, 1, 997), (5000, 1, 4999), (50_000, 1, 7919), (10, 1, 3),
     (1000, 8, None), (1003, 8, 16), (7, 8, None), (10_000, 700, 2100)],
)  # fmt: skip
def test_blocks_end_where_something_is_told(steps, unit, log_every):
    blocks = list(blocks_of(steps, unit, log_every))
    starts, stops = map(list, zip(*blocks, strict=True))
    assert [*starts, steps] == [0, *stops]
    assert set(range(log_every or steps, steps, log_every or steps)) <= set(stops)
    assert all(start % unit == 0 for start in starts)
    lengths = [stop - start for start, stop in blocks]
    assert max(lengths) <= max(1000, unit)
    assert len(set(lengths)) <= 3
    assert steps < 1000 or len(blocks) < 0.1 * steps


@pytest.mark.parametrize("name", ["etrace_grad, masked mean", "etrace_evolve", "predict"])
def test_every_driver_does_what_it_does_unwatched(name, capsys):
    found, expected = (new_learner(CASE, which=number) for number in range(2))
    told = []

    def on_log(step, metrics):
        told.append((step, metrics, snapshot(found)))

    reset = np.arange(LENGTH) == 13
    result = drivers(found)[name](progress=True, log_every=10, on_log=on_log, reset=reset)
    compared = drivers(expected)[name](reset=reset)

    def close(one, other):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)

    assert jax.tree.structure(result) == jax.tree.structure(compared)
    jax.tree.map(close, result, compared)
    jax.tree.map(close, snapshot(found), snapshot(expected))
    bar = capsys.readouterr().err
    assert name.split(",")[0] in bar and "40/40" in bar
    assert [step for step, *_ in told] == [10, 20, 30, 40]
    assert all(metrics["steps_per_second"] > 0 for _, metrics, _ in told)
    jax.tree.map(close, told[-1][2], snapshot(expected))
    assert not np.allclose(*(told[k][2][0][("h",)] for k in (0, 1)))
    if "etrace_online" in name or "masked" in name:
        assert "loss=" in bar
        losses = jax.tree.leaves(compared)[-2 if "," in name else 0]
        counts = MASK[10:20] if "," in name else np.ones(10, bool)
        close(told[1][1]["loss"], losses[10:20][counts].mean())
    if "," in name:
        close(told[1][1]["aux"]["twice"], jax.tree.leaves(compared)[-1][10:20][counts].mean())


def test_windows_stay_where_they_are():
    """A window is a part of the estimate: no block cuts one."""
    found, expected = (build_learner(CASE, window=8) for _ in range(2))

    def gradient(learner, **more):
        return learner.etrace_grad(XS, YS, step_fn=lambda x, y: CASE.loss(learner(x), y), **more)

    result = gradient(found, log_every=16, on_log=lambda step, metrics: None)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), result, gradient(expected)
    )


class Interrupting:
    """Sends Ctrl-C in the middle of things: while a block runs, or is told of."""

    def __init__(self, at):
        self.at = at

    def __call__(self, step, metrics):
        if step == self.at:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.core
def test_ctrl_c_ends_with_a_completed_step():
    """The learner is where an unwatched call of so many steps leaves it, and goes on."""
    found, expected = (new_learner(CASE, which=number) for number in range(2))
    with pytest.raises(KeyboardInterrupt, match="after 20 of 40 steps") as caught:
        drivers(found)["etrace_online"](log_every=10, on_log=Interrupting(20))
    assert isinstance(caught.value, braintrace.Interrupted) and caught.value.step == 20
    losses = drivers(expected)["etrace_online"]()
    assert_same_bits(caught.value.results, losses[:20])
    assert found.optimizer_state[0].count == 20
    rest = found.etrace_online(
        XS[20:],
        YS[20:],
        step_fn=lambda x, y: CASE.loss(found(x), y),
        optimizer=optax.adam(0.01),
    )
    assert_same_bits(rest, losses[20:])
    assert_same_bits(snapshot(found), snapshot(expected))


def test_ctrl_c_while_a_block_runs():
    """It waits for the block: nothing is half done."""
    learner = new_learner(CASE)

    def interrupt(x):
        os.kill(os.getpid(), signal.SIGINT)
        return x

    def step_fn(x, y, is_last):
        y = jax.lax.cond(is_last, lambda: jax.pure_callback(interrupt, y, y), lambda: y)
        return CASE.loss(learner(x), y)

    last = np.arange(LENGTH) == 13
    optimizer = optax.adam(0.01)
    with pytest.raises(braintrace.Interrupted) as caught:
        learner.etrace_online(
            XS, YS, last, step_fn=step_fn, optimizer=optimizer, log_every=10, on_log=print
        )
    assert caught.value.step == learner.optimizer_state[0].count
    assert 14 <= caught.value.step < LENGTH


def test_errors_of_the_users_function_come_as_they_are():
    """What is done stays done."""
    learner = new_learner(CASE)

    def on_log(step, metrics):
        if step == 20:
            raise KeyError(step)

    with pytest.raises(KeyError):
        drivers(learner)["etrace_online"](log_every=10, on_log=on_log)
    assert learner.optimizer_state[0].count == 20


def test_the_step_of_what_is_not_finite_is_counted_from_the_beginning():
    learner, ys = new_learner(CASE), np.array(YS)
    ys[25] = np.inf

    def run(**more):
        learner.etrace_online(
            XS,
            ys,
            step_fn=lambda x, y: CASE.loss(learner(x), y),
            optimizer=optax.adam(0.01),
            nonfinite="raise",
            **more,
        )

    with pytest.raises(braintrace.NonFiniteError, match="before the call") as caught:
        run()
    assert caught.value.step == 25 and learner.optimizer_state is None
    with pytest.raises(braintrace.NonFiniteError, match="after 24 steps") as caught:
        run(log_every=10, on_log=lambda step, metrics: None)
    assert caught.value.step == 25 and learner.optimizer_state[0].count == 24


def test_without_tqdm_the_extra_is_named(monkeypatch):
    learner = new_learner(CASE)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="progress"):
        learner.predict(XS, progress=True)


def test_whoever_is_told_may_use_the_learner():
    learner = new_learner(CASE)
    seen = []

    def on_log(step, metrics):
        pure = learner.functional()
        seen.append(pure.predict(pure.state(), XS[:2])[1].shape)

    drivers(learner)["etrace_online"](log_every=20, on_log=on_log)
    assert seen == [(2, *learner.predict(XS[:1]).shape[1:])] * 2


def test_sequences_of_pytrees_and_numpy_arrays():
    learner = new_learner(CASE)
    found = learner.etrace_online(
        {"x": XS, "y": np.asarray(YS)},
        step_fn=lambda both: CASE.loss(learner(both["x"]), both["y"]),
        update_fn=lambda gradients: None,
        log_every=10,
        on_log=lambda step, metrics: None,
    )
    assert found.shape == (LENGTH,) and isinstance(found, jnp.ndarray)
