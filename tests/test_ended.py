"""Public names that have ended raise an error that names their replacement."""

import jax.numpy as jnp
import pytest

import braintrace
from braintrace._ended import REPLACEMENTS


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_an_ended_name_has_a_replacement(name):
    owner = braintrace
    if name.startswith("Learner."):
        owner = braintrace.compile(braintrace.nn.IndRNN(2, 3), "d_rtrl", jnp.ones(2))
    with pytest.raises(AttributeError, match=f"`{name}` has ended: use `"):
        getattr(owner, name.removeprefix("Learner."))
