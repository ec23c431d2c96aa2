"""Names of the other package of this name: each row of the page's table works as it says."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import nn

XS = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 2, 3)


class Network(brainstate.nn.Module):
    """A recurrent layer with a readout, of which the last product may have a feedback matrix."""

    def __init__(self, readout=nn.Linear):
        super().__init__()
        self.cell, self.readout = nn.IndRNN(3, 4), readout(4, 2)

    def update(self, x):
        return self.readout(self.cell(x))


def compiled(model, algorithm="d_rtrl", **options):
    return braintrace.compile(model, algorithm, XS[0], batch_size=2, **options)


def test_traces_exist_after_compile_graph():
    learner = compiled(Network())
    learner(XS[0])
    before = jax.tree.map(np.asarray, learner.algorithm.traces.value)
    learner.algorithm.init_etrace_state()
    jax.tree.map(np.testing.assert_array_equal, learner.algorithm.traces.value, before)
    with pytest.raises(braintrace.NotCompiledError, match="compile_graph"):
        braintrace.D_RTRL(Network()).init_etrace_state()


def test_a_learner_shows_its_model_and_its_states():
    learner = compiled(Network())
    assert learner.module is learner.algorithm.model
    assert learner.param_states[("cell", "u")] is learner.module.cell.u
    assert learner.hidden_states[("cell", "h")] is learner.module.cell.h


@pytest.mark.parametrize("of", [lambda cell: cell.u, lambda _: "cell/u", lambda _: ("cell", "u")])
def test_the_trace_of_a_weight_by_the_weight_its_name_and_its_path(of):
    learner = compiled(Network())
    learner(XS[0])
    weight, expected = of(learner.module.cell), learner.eligibility("cell/u")
    for found in (learner.get_etrace_of(weight), learner.algorithm.get_etrace_of(weight)):
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    with pytest.raises(braintrace.OptionError, match=r"not a parameter of the model.*'cell/u'"):
        learner.get_etrace_of(brainstate.ParamState(jnp.ones(4)))


def test_an_algorithm_has_a_name():
    assert compiled(Network(), name="mine").algorithm.name == "mine"
    with pytest.raises(braintrace.OptionError, match="`name` is 3; expected a string or None"):
        braintrace.D_RTRL(Network(), name=3)


@pytest.mark.parametrize("feedback", [None, "symmetric", "random"])
@pytest.mark.parametrize("readout", [nn.Linear, nn.FeedbackLinear])
def test_feedback_of_e_prop_is_that_of_the_readout(readout, feedback):
    fits = {None: True, "symmetric": readout is nn.Linear, "random": readout is not nn.Linear}
    if fits[feedback]:
        assert compiled(Network(readout), "eprop", feedback=feedback).is_compiled
    else:
        with pytest.raises(braintrace.CompilationError, match=f"'{feedback}'.*feedback_matmul"):
            compiled(Network(readout), "eprop", feedback=feedback)


def test_a_readout_draws_the_same_feedback_from_the_same_seed():
    draws = []
    for seed in (1, 1, 2):
        with brainstate.random.seed_context(seed):
            draws.append(nn.FeedbackLinear(4, 2).feedback.value)
    np.testing.assert_array_equal(draws[0], draws[1])
    assert np.all(draws[0] != draws[2])


def test_a_chunk_size_of_none_is_chosen():
    learner = compiled(Network())

    def gradient(chunk_size):
        learner.reset_state()
        return learner.etrace_grad(XS, step_fn=lambda x: learner(x).sum(), chunk_size=chunk_size)

    jax.tree.map(np.testing.assert_array_equal, gradient(None), gradient("auto"))


@pytest.mark.parametrize("name", ["ReLU", "Dropout", "LayerNorm", "MaxPool2d", "Sequential"])
def test_layers_without_a_product_are_those_of_brainstate(name):
    assert getattr(nn, name) is getattr(brainstate.nn, name)


@pytest.mark.parametrize("name", ["ConvTranspose2d", "EventLinear", "Delay", "Missing"])
def test_no_other_layer_of_brainstate_is_passed_on(name):
    with pytest.raises(AttributeError, match=name):
        getattr(nn, name)


def test_every_layer_that_is_passed_on_exists():
    missing = [name for name in nn._WITHOUT_PRODUCT if not hasattr(brainstate.nn, name)]
    assert not missing
    assert nn._WITHOUT_PRODUCT.isdisjoint(vars(nn))
