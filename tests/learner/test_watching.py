"""A call that is watched does what it does unwatched, tells of it, and ends where it is told to."""

import sys

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drivers import new_learner, snapshot

import braintrace

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
    return {
        "etrace_online": lambda **more: learner.etrace_online(XS, YS, **learning, **more),
        "etrace_online, blocks": lambda **more: learner.etrace_online(
            XS, YS, **{**learning, "step_fn": with_aux}, every=5, mask=MASK, has_aux=True, **more
        ),
        "etrace_evolve": lambda **more: learner.etrace_evolve(XS, **more),
        "predict": lambda **more: learner.predict(XS, **more),
    }


@pytest.mark.parametrize("name", ["etrace_online, blocks", "etrace_evolve", "predict"])
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
    if "etrace_online" in name:
        assert "loss=" in bar
        losses = jax.tree.leaves(compared)[-2 if "," in name else 0]
        counts = MASK[10:20] if "," in name else np.ones(10, bool)
        close(told[1][1]["loss"], losses[10:20][counts].mean())
    if "," in name:
        close(told[1][1]["aux"]["twice"], jax.tree.leaves(compared)[-1][10:20][counts].mean())


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
    assert caught.value.step == 25 and learner.optimizer_state[0].count == 0
    with pytest.raises(braintrace.NonFiniteError, match="after 20 steps") as caught:
        run(log_every=10, on_log=lambda step, metrics: None)
    assert caught.value.step == 25 and learner.optimizer_state[0].count == 20


def test_without_tqdm_the_extra_is_named(monkeypatch):
    learner = new_learner(CASE)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="examples"):
        learner.predict(XS, progress=True)


def test_whoever_is_told_may_use_the_learner():
    learner = new_learner(CASE)
    seen = []

    def on_log(step, metrics):
        pure = learner.functional()
        seen.append(pure.predict(pure.state(), XS[:2])[1].shape)

    drivers(learner)["etrace_online"](log_every=20, on_log=on_log)
    assert seen == [(2, *learner.predict(XS[:1]).shape[1:])] * 2


def test_a_log_within_a_block_is_refused():
    with pytest.raises(braintrace.OptionError, match="multiple of 5"):
        drivers(new_learner(CASE))["etrace_online, blocks"](log_every=8, on_log=print)


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
