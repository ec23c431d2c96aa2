"""Programs are lowered for processors and accelerators, also where none of them is there."""

import jax
import numpy as np
import optax
import pytest
from learners import TARGETS, XS, learner_of, step_of
from random_models import Layer, RandomModel

pytestmark = pytest.mark.usefixtures("float64")

PLATFORMS = ("cpu", "cuda", "tpu")
MODELS = {
    "leaky": RandomModel((Layer("bias", "gain", "leak"),), "leaky"),
    "sparse": RandomModel((Layer("sparse", "sparse", "adapting"),)),
    "conv": RandomModel((Layer("conv", "matmul", "lstm"),), "bypass"),
    "embedding": RandomModel((Layer("embedding"), Layer("low rank", "matmul"))),
    "grouped": RandomModel((Layer("grouped", "masked", "loop"),), "late"),
}
CASES = [
    ("sparse", "d_rtrl", {}),
    ("embedding", "es_d_rtrl", {"decay_or_rank": 0.9}),
    ("conv", "d_rtrl", {"window": 3}),
    ("leaky", "rtrl", {}),
    ("grouped", "uoro", {}),
]
MASK, RESET = np.arange(len(XS)) != 2, np.arange(len(XS)) == 3


def lowered(function, state):
    traced = jax.jit(function).trace(state, XS, TARGETS)
    return traced.lower(lowering_platforms=PLATFORMS)


@pytest.mark.core
@pytest.mark.parametrize(("name", "rule", "options"), CASES)
def test_gradient_traces_and_stream_are_lowered_for_all_platforms(name, rule, options):
    learner = learner_of(MODELS[name], rule, **options)
    learner.init_optimizer(optimizer := optax.adam(0.01))
    pure = learner.functional()
    own = {"step_fn": step_of(learner), "mask": MASK, "reset": RESET}

    def of_sequence(state, xs, targets):
        return pure.grad(state, xs, targets, chunk_size=2, **own)

    def of_traces(state, xs, targets):
        """In one program; outside of `jit` they are computed when something reads them."""
        return pure.grad(state, xs, targets, **own)[0].traces

    def of_stream(state, xs, targets):
        window = options.get("window", 1)
        return pure.online(state, xs, targets, optimizer=optimizer, every=window, **own)

    for function in (of_sequence, of_traces, of_stream):
        assert lowered(function, pure.state()).as_text()
