"""A network with conductances learns to keep a cue; the gradient of one step does not."""

import example_scripts
import pytest

pytestmark = pytest.mark.nightly


def test_it_learns_and_the_baseline_does_not():
    example = example_scripts.load("conductances")
    before, after = example.train("d_rtrl")
    assert before < 0.7 and after > 0.9
    assert example.train("immediate")[1] < 0.75
