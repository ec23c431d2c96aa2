"""Synthetic tasks that require memory: the input comes long before the answer."""

from typing import Any

import jax
import jax.numpy as jnp

from .draws import made_up
from .task import Batch, Task

NOISE = 0.1
"""Standard deviation of the noise on every input of the tasks with stimuli."""


def copy_with_lag(symbols: int = 4, lag: int = 6, length: int = 40) -> Task:
    """Say at every step the symbol that was seen ``lag`` steps ago."""

    def make(key: Any, size: int) -> Batch:
        seen = jax.random.randint(key, (length, size), 0, symbols)
        is_known = jnp.broadcast_to(jnp.arange(length)[:, None] >= lag, seen.shape)
        targets = jnp.where(is_known, jnp.roll(seen, lag, axis=0), 0)
        return Batch(jax.nn.one_hot(seen, symbols), targets, is_known.astype(jnp.float32))

    return Task(
        *made_up(make),
        outputs=symbols,
        counted=float(length - lag),
        chance=1 / symbols,
        threshold=0.9,
        truncations=(5, 20),
        updates=400,
    )


def adding_problem(length: int = 40) -> Task:
    """Add the two numbers that are marked, one in each half; the sum is scaled to variance 1."""

    def make(key: Any, size: int) -> Batch:
        to_value, *to_place = jax.random.split(key, 3)
        numbers = jax.random.uniform(to_value, (length, size))
        half = length // 2
        places = [
            jax.random.randint(k, (size,), 0, half) + half * i for i, k in enumerate(to_place)
        ]
        steps = jnp.arange(length)[:, None]
        marks = ((steps == places[0]) | (steps == places[1])).astype(jnp.float32)
        total = jnp.sum(marks * numbers, axis=0)
        targets = jnp.broadcast_to((jnp.sqrt(6.0) * (total - 1))[:, None], (length, size, 1))
        inputs = jnp.stack([2 * numbers - 1, marks], axis=-1)
        return Batch(inputs, targets, _last(length, size, 1))

    return Task(
        *made_up(make), outputs=1, kind="values", threshold=0.9, truncations=(5, 20), updates=800
    )


def evidence_accumulation(cues: int = 7, delay: int = 10) -> Task:
    """Say on which side more cues were, some time after the last of them."""
    on, period, asked = 2, 3, 3
    shown = cues * period
    length = shown + delay + asked

    def make(key: Any, size: int) -> Batch:
        to_cue, to_noise = jax.random.split(key)
        is_right = jax.random.bernoulli(to_cue, 0.5, (cues, size))
        sides = jnp.stack([~is_right, is_right], axis=-1).astype(jnp.float32)
        pulse = (jnp.arange(period) < on)[None, :, None, None]
        pulses = (sides[:, None] * pulse).reshape(shown, size, 2)
        inputs = jnp.zeros((length, size, 3)).at[:shown, :, :2].set(pulses)
        answer = (jnp.sum(is_right, axis=0) > cues // 2).astype(jnp.int32)
        return _asked(inputs, answer, asked, to_noise)

    return _choice(make, asked, truncations=(4, 16), updates=400)


def delayed_xor(delay: int = 8) -> Task:
    """Say whether two signs differ, the second seen after a delay and asked for after another."""
    on, jitter, asked = 2, 3, 2
    second = on + jitter + delay
    length = second + on + jitter + delay + asked

    def make(key: Any, size: int) -> Batch:
        to_bit, to_place, to_noise = jax.random.split(key, 3)
        bits = jax.random.bernoulli(to_bit, 0.5, (2, size))
        places = jax.random.randint(to_place, (2, size), 0, jitter + 1)
        since = jnp.arange(length)[:, None, None] - places - jnp.array([[0], [second]])
        pulses = jnp.where((since >= 0) & (since < on), 2.0 * bits - 1, 0.0)
        inputs = jnp.stack([jnp.sum(pulses, axis=1), jnp.zeros((length, size))], axis=-1)
        return _asked(inputs, (bits[0] ^ bits[1]).astype(jnp.int32), asked, to_noise)

    return _choice(make, asked, truncations=(4, 16), updates=800)


def _last(length: int, size: int, counted: int) -> jax.Array:
    """Return weights that count the last steps."""
    steps = jnp.arange(length)[:, None]
    return jnp.broadcast_to(steps >= length - counted, (length, size)).astype(jnp.float32)


def _asked(inputs: jax.Array, answer: jax.Array, asked: int, key: Any) -> Batch:
    """Return a batch with noise on the inputs, the last of which says when the answer counts."""
    length, size, _ = inputs.shape
    weights = _last(length, size, asked)
    inputs = inputs.at[..., -1].set(weights)
    inputs = inputs + NOISE * jax.random.normal(key, inputs.shape)
    return Batch(inputs, jnp.broadcast_to(answer, weights.shape), weights)


def _choice(make: Any, asked: int, truncations: tuple[int, int], updates: int) -> Task:
    """Return a task of two answers that are equally frequent."""
    return Task(
        *made_up(make),
        outputs=2,
        counted=float(asked),
        chance=0.5,
        threshold=0.9,
        truncations=truncations,
        updates=updates,
    )
