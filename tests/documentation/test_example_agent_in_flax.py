"""Agents in Flax and Equinox learn what to remember; the gradient of one step does not."""

import brainstate
import example_scripts
import pytest

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("framework", ["nnx", "equinox"])
def test_it_remembers_and_the_baseline_does_not(framework):
    pytest.importorskip({"nnx": "flax"}.get(framework, framework))
    example = example_scripts.load("agent_in_flax")
    brainstate.random.seed(0)
    learned = example.returns(framework, "d_rtrl")
    baseline = example.returns(framework, "immediate")
    assert learned.min() > 0.9
    assert baseline.mean() < 0.6
