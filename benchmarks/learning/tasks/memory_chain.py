"""A memory chain: a sign is seen at first, and many steps later the agent is to act by it.

What an agent does before it is asked changes neither what it sees nor what it earns, so an episode
is a sequence, and the gradient of an actor-critic is that of a loss of its last answer: with the
action ``a`` that is drawn from the policy ``π``, the reward ``r`` and the value ``v``,

.. math:: -(r - v) ∇ \\log π(a) + \\tfrac12 ∇ (r - v)^2.

The agent learns from the reward of what it does and not from what would have been right.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .draws import made_up
from .task import Batch, Task


def memory_chain(length: int = 20) -> Task:
    """See a sign, and ``length`` steps later choose between two actions."""

    def make(key: Any, size: int) -> Batch:
        to_sign, to_act = jax.random.split(key)
        sign = jax.random.bernoulli(to_sign, 0.5, (size,)).astype(jnp.float32)
        step = jnp.broadcast_to(jnp.arange(length + 1)[:, None], (length + 1, size))
        is_asked = (step == length).astype(jnp.float32)
        columns = [jnp.where(step == 0, 2 * sign - 1, 0.0), is_asked, 1 - step / length]
        drawn = jax.random.uniform(to_act, step.shape)
        targets = jnp.stack([jnp.broadcast_to(sign, step.shape), drawn], axis=-1)
        return Batch(jnp.stack(columns, axis=-1), targets, is_asked)

    return Task(
        *made_up(make), outputs=3, kind="rewards", threshold=0.8, truncations=(4, 10), updates=500
    )
