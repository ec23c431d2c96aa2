"""How exact a rule is on a class of models: every cell of the tables in `docs/algorithms.md`."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from backpropagation import backpropagated
from drivers import quietly_compiled
from exactness import MODELS, RULES, promises
from public_names import PUBLIC

import braintrace
from braintrace._algorithms.names import algorithm_of

LENGTH, BATCH, DRAWS = 5, 2, 400
PROMISES = promises()


def test_the_page_has_every_rule_and_every_model():
    assert set(PROMISES) == set(itertools.product(MODELS, RULES))
    assert set(PROMISES.values()) == set(CHECKS)
    algorithms = {getattr(braintrace, name) for name in PUBLIC}
    algorithms = {a for a in algorithms if isinstance(a, type) and getattr(a, "names", ())}
    assert algorithms == {algorithm_of(rule.name, "rule") for rule in RULES.values()}


@pytest.mark.parametrize(
    ("rule", "model"),
    [
        ("`OSTLRecurrent`", "a stack of recurrent layers"),
        ("`D_RTRL`", "a stack of these"),
        ("`EProp`", "one of these, a leaky linear readout"),
        ("`RFLO`", "one of these, a `feedback_matmul` as readout"),
    ],
)
@pytest.mark.usefixtures("float64")
def test_a_rule_is_as_exact_as_the_page_says(rule, model):
    CHECKS[PROMISES[model, rule]](RULES[rule], model)


# --- what a cell promises


def exact(rule, model):
    """The gradient of backpropagation through time, however the sequence is cut."""
    learner = learner_of(rule, model)
    for chunk_size in ("auto", 2):
        assert (
            max(deviations(gradient(learner, model, chunk_size=chunk_size), model).values()) < 1e-10
        )


def in_the_top_layer(rule, model):
    off = deviations(gradient(learner_of(rule, model), model), model)
    top = MODELS[model].top
    assert max(off[name] for name in top) < 1e-10
    assert min(value for name, value in off.items() if name not in top) > 1e-3


def in_the_window(rule, model):
    learner = learner_of(rule, model)
    assert max(deviations(gradient(learner, model, window=LENGTH), model).values()) < 1e-10
    approximate(rule, model, learner)


def in_the_mean(rule, model):
    expected, found = bptt(model), many_draws(rule, model)
    far = 0.0
    for name, draws in found.items():
        error, scale = np.abs(draws.mean(0) - expected[name]), np.abs(expected[name]).max()
        spread = draws.std(0, ddof=1)
        assert np.all(error < 5 * spread / np.sqrt(DRAWS) + 1e-10 * scale), name
        far = max(far, spread.max() / scale)
    assert far > 0.05


def approximate(rule, model, learner=None):
    learner = learner_of(rule, model) if learner is None else learner
    assert max(deviations(gradient(learner, model), model).values()) > 1e-3


def refused(rule, model):
    name = algorithm_of(rule.name, "rule").__name__.replace("_", "[_-]")
    with pytest.raises(braintrace.BraintraceError, match=name) as found:
        learner_of(rule, model)
    assert "<filters>" not in str(found.value)


CHECKS = {
    "exact": exact,
    "top layer": in_the_top_layer,
    "window": in_the_window,
    "mean": in_the_mean,
    "approximate": approximate,
    "refused": refused,
}


# --- gradients


def data(model):
    draw = np.random.default_rng(1).standard_normal
    return 1.5 * draw((LENGTH, BATCH, *MODELS[model].shape)), draw((LENGTH, BATCH, 2))


def loss(model, x, target):
    return ((model(x) - target) ** 2).mean()


def learner_of(rule, model):
    module, example = MODELS[model].module(), data(model)[0][0]
    return quietly_compiled(module, rule.name, example, batch_size=BATCH, **rule.options)


def gradient(learner, model, **options):
    learner.reset_state()
    options = {"step_fn": functools.partial(loss, learner), "reduction": "sum", **options}
    return leaves(learner.etrace_grad(*data(model), **options))


def many_draws(rule, model):
    """Gradients of many keys, {parameter: (draws, ...)}."""
    learner = learner_of(rule, model)
    pure, step_fn = learner.functional(), functools.partial(loss, learner)
    start, sequences = pure.state(), data(model)

    def of_key(key):
        state = dataclasses.replace(start, traces={**start.traces, "key": key})
        return pure.grad(state, *sequences, step_fn=step_fn, reduction="sum")[1]

    keys = jax.random.key_data(jax.random.split(jax.random.key(1), DRAWS))
    return leaves(jax.jit(jax.vmap(of_key))(keys))


@functools.cache
def bptt(model):
    """The gradient of the whole sequence, by reverse mode through it."""
    module = MODELS[model].module()
    return leaves(backpropagated(module, loss, *data(model), batch_size=BATCH))


def leaves(gradients):
    """{"path": gradient}; what one parameter holds in several arrays, by "path/key"."""
    paths = jax.tree.leaves_with_path({"/".join(path): value for path, value in gradients.items()})
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in paths
    }


def deviations(found, model):
    """Largest difference of each parameter, relative to its largest entry."""
    return {
        name: np.abs(found[name] - wanted).max() / np.abs(wanted).max()
        for name, wanted in bptt(model).items()
    }
