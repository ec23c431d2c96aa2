"""Random mixes of options of `etrace_grad`, beside backpropagation with resets in plain JAX.

RTRL is exact for every model, D_RTRL where states are elementwise, both in windows of any length.
What a mix is made of: a model, a batch style, masks, resets, windows, chunks, budgets, reductions,
auxiliary results, watched calls, some of the weights, and a sequence that is given in parts.
"""

import random

import catalogue
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from assertions import assert_gradients_close
from drivers import named, shared_learner

LENGTH = 6
DIAGONAL = [case.name for case in catalogue.DIAGONAL if not case.costs_accuracy]
OTHERS = ["GRUResetAfter", "LSTMFused", "RecurrentLIF", "TwoLayers"]
STYLES = {"batch axis": 3, "mapped": 3, "single": None}
BY_NIGHT = 240


def mix_of(seed):
    """Draw a mix of options."""
    draw = random.Random(seed)
    rule = draw.choice(["d_rtrl", "rtrl"])
    name = draw.choice(DIAGONAL if rule == "d_rtrl" else [*DIAGONAL, *OTHERS])
    style = draw.choice([*STYLES])
    numbers = np.random.default_rng(seed)
    resets = {
        "none": None,
        "all": numbers.random(LENGTH) < 0.3,
        "some": numbers.random((LENGTH, STYLES[style] or 1)) < 0.3,
    }
    masks = {
        "none": None,
        "weights": numbers.integers(0, 3, LENGTH) / 2 + (np.arange(LENGTH) == LENGTH - 1),
        "last": (np.arange(LENGTH) == LENGTH - 1).astype(float),
    }
    options = {
        "mask": masks[draw.choice([*masks])],
        "reset": resets[draw.choice(["none", "all", *(["some"] if STYLES[style] else [])])],
        "reduction": draw.choice(["sum", "mean"]),
        "has_aux": draw.random() < 0.3,
        "return_value": draw.random() < 0.3,
        **draw.choice(
            [{}, {"memory_budget": 200}, *({"chunk_size": n} for n in (1, 2, 3, 4, 6, 100))]
        ),
    }
    options["window"] = random.Random(f"window {seed}").choice([None, 1, 2, 3, 4, 100])
    cut = draw.choice([None, None, 1, 3]) if options["reduction"] == "sum" else None
    return rule, name, style, options, cut, draw.random() < 0.2


@oracles.compiled
def loss_of(case, params, states, xs, targets, weights, resets):
    """The weighted sum of losses and its gradient; a sample that is reset starts as at first."""

    def total(params):
        def step(now, inputs):
            x, target, weight, reset = inputs
            now = jax.tree.map(lambda h, h0: jnp.where(reset[..., None], h0, h), now, states)
            ops = oracles.PlainOps()
            output = case.step(ops, params, now, x)
            return ops.hidden, weight * case.loss(output, target)

        return jax.lax.scan(step, states, (xs, targets, weights, resets))[1].sum()

    return jax.value_and_grad(total)(params)


def weights_of(options):
    """Return what the loss of each step is multiplied by."""
    weights = np.ones(LENGTH) if options["mask"] is None else options["mask"]
    return weights / weights.sum() if options["reduction"] == "mean" else weights


def expected(name, style, mask, reset, reduction, **_):
    """Return the loss and its gradients in float64."""
    case, batch = catalogue.BY_NAME[name], STYLES[style]
    weights = weights_of({"mask": mask, "reduction": reduction})
    shape = (LENGTH,) if batch is None else (LENGTH, batch)
    resets = np.zeros(shape, bool)
    if reset is not None:
        resets |= reset.reshape(LENGTH, *(1,) * (len(shape) - reset.ndim), *reset.shape[1:])
    with jax.enable_x64(True):
        given = case.params(np.float64), case.initial_states(batch, np.float64)
        sequences = case.sequences(batch, LENGTH, np.float64)
        loss, gradients = loss_of(case, *given, *sequences, weights, resets)
        return float(loss), jax.tree.map(np.asarray, gradients)


def found(rule, name, style, options, cut, in_part):
    """Return the loss or None, and gradients, of a sequence that is cut at a step."""
    case = catalogue.BY_NAME[name]
    learner = shared_learner(case, rule, style, batch=3)
    learner.reset_state()
    sequences = case.sequences(STYLES[style], LENGTH)

    def step_fn(x, target):
        loss = case.loss(learner(x), target)
        return (loss, {"target": target}) if options["has_aux"] else loss

    if in_part:
        own = learner.algorithm.param_states
        options = {**options, "weights": dict(list(own.items())[::2])}
    total, value = None, 0.0
    for part in [slice(0, cut), slice(cut, None)] if cut else [slice(None)]:
        own = {n: None if options[n] is None else options[n][part] for n in ("mask", "reset")}
        result = learner.etrace_grad(
            *(sequence[part] for sequence in sequences), step_fn=step_fn, **{**options, **own}
        )
        gradients, *rest = result if isinstance(result, tuple) else (result,)
        if options["return_value"]:
            value += float(np.sum(weights_of(options)[part] * rest[0]))
        if options["has_aux"]:
            np.testing.assert_array_equal(rest[-1]["target"], sequences[1][part])
        gradients = named(gradients)
        total = gradients if total is None else jax.tree.map(jnp.add, total, gradients)
    return value if options["return_value"] else None, total


def check_mix(seed):
    mix = mix_of(seed)
    _, name, style, options, *_ = mix
    loss, gradients = expected(name, style, **options)
    value, total = found(*mix)
    gradients = {path: gradient for path, gradient in gradients.items() if path in total}
    assert_gradients_close(total, gradients, 1e-4, f"mix {seed}: {mix}")
    if value is not None:
        np.testing.assert_allclose(value, loss, rtol=1e-4, err_msg=f"mix {seed}")


@pytest.mark.parametrize("seed", [60, 180])
def test_a_random_mix_of_options_gives_the_gradient(seed):
    check_mix(seed)
