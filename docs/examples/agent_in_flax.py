"""Train a recurrent actor-critic that is written in Flax NNX or in Equinox.

An environment shows a sign and asks for it ten steps later; the reward is 1 for the right answer
and -1 for the wrong one. Sixteen environments run at once, and each starts a new episode when one
has ended. Parameters change at every step. All of it, three seeds included, is one `jax.jit`.

The memory of the network is a layer of leaky units, each with a decay of its own that it learns.
Units do not read one another, so D-RTRL is exact for it. The baseline is the rule `immediate`,
which differentiates one step: it can read the memory, and cannot learn what to keep.

    pip install -e ".[examples]" flax equinox
    python docs/examples/agent_in_flax.py    13 seconds of processor time
    python docs/examples/agent_in_flax.py --framework equinox
"""

import argparse
import dataclasses
import functools
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import optax

import braintrace

ENVIRONMENTS, UNITS, LENGTH = 16, 32, 10
LEARNING_RATE, DISCOUNT, CREDIT = 3e-3, 0.99, 0.9

# --- the network, in either framework ----------------------------------------------------


def network_in_nnx(seed):
    """Return a step function, its parameters and its state, from Flax NNX."""
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.read = nnx.Linear(3, UNITS, rngs=rngs)
            self.decay = nnx.Param(jax.random.uniform(rngs.params(), (UNITS,), minval=-1, maxval=1))
            self.hidden = nnx.Linear(UNITS, UNITS, rngs=rngs)
            self.policy = nnx.Linear(UNITS, 2, kernel_init=nnx.initializers.zeros, rngs=rngs)
            self.value = nnx.Linear(UNITS, 1, kernel_init=nnx.initializers.zeros, rngs=rngs)

        def __call__(self, memory, x):
            memory = jax.nn.sigmoid(self.decay[...]) * memory + self.read(x)
            hidden = jnp.tanh(self.hidden(memory))
            return memory, (self.policy(hidden), self.value(hidden)[0])

    graphdef, params = nnx.split(Network(nnx.Rngs(seed)))
    return lambda params, memory, x: nnx.merge(graphdef, params)(memory, x), params


def network_in_equinox(seed):
    """Return the same from Equinox."""
    import equinox as eqx

    class Network(eqx.Module):
        read: eqx.nn.Linear
        decay: jax.Array
        hidden: eqx.nn.Linear
        policy: eqx.nn.Linear
        value: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 5)
            self.read = eqx.nn.Linear(3, UNITS, key=keys[0])
            self.decay = jax.random.uniform(keys[1], (UNITS,), minval=-1, maxval=1)
            self.hidden = eqx.nn.Linear(UNITS, UNITS, key=keys[2])
            zeros = lambda layer: jax.tree.map(jnp.zeros_like, layer)  # noqa: E731
            self.policy = zeros(eqx.nn.Linear(UNITS, 2, key=keys[3]))
            self.value = zeros(eqx.nn.Linear(UNITS, 1, key=keys[4]))

        def __call__(self, memory, x):
            memory = jax.nn.sigmoid(self.decay) * memory + self.read(x)
            hidden = jnp.tanh(self.hidden(memory))
            return memory, (self.policy(hidden), self.value(hidden)[0])

    params, static = eqx.partition(Network(jax.random.key(seed)), eqx.is_array)
    return lambda params, memory, x: eqx.combine(params, static)(memory, x), params


NETWORKS = {"nnx": network_in_nnx, "equinox": network_in_equinox}


# --- the environment ---------------------------------------------------------------------


class World(NamedTuple):
    """One environment: the sign to remember, and the step of the episode."""

    sign: jax.Array
    time: jax.Array


def begin(key):
    return World(jax.random.rademacher(key, (), float), jnp.zeros((), int))


def observe(world):
    """Return the sign at the first step, whether it is asked for, and the time."""
    shown = jnp.where(world.time == 0, world.sign, 0.0)
    return jnp.stack([shown, (world.time == LENGTH) * 1.0, world.time / LENGTH])


def act_on(world, action, key):
    """Return the next environment, the reward, and whether the episode has ended."""
    is_last = world.time == LENGTH
    reward = jnp.where(is_last, world.sign * (2.0 * action - 1.0), 0.0)
    going_on = World(world.sign, world.time + 1)
    new = jax.tree.map(lambda a, b: jnp.where(is_last, a, b), begin(key), going_on)
    return new, reward, is_last


# --- the agent ---------------------------------------------------------------------------


class Life(NamedTuple):
    """What passes from step to step."""

    parameters: Any
    moments: Any
    memory: Any
    credit: Any
    worlds: World
    before: tuple[jax.Array, jax.Array, jax.Array]  # value, reward, discount of the last step
    key: jax.Array


def choose(agent, parameters, memory, world, key, is_new):
    """Return what the agent differentiates, its state and action, for one environment."""
    state = agent.reset(dataclasses.replace(memory, parameters=parameters), where=is_new)
    state, (logits, value) = agent.step(state, observe(world))
    action = jax.random.categorical(key, logits)
    chosen = jax.nn.log_softmax(logits)[action]
    return value + chosen, (dataclasses.replace(state, parameters={}), action, value)


def training(framework, rule, steps):
    """Return a function of parameters and a key that trains an agent, and initial parameters."""
    step, params = NETWORKS[framework](0)
    model = braintrace.from_function(step, params, jnp.zeros(UNITS))
    agent = braintrace.compile(model, rule, jnp.zeros(3)).functional()
    differentiate = jax.grad(functools.partial(choose, agent), has_aux=True)
    choose_all = jax.vmap(differentiate, in_axes=(None, 0, 0, 0, 0))
    initial = agent.state().parameters
    memory = dataclasses.replace(agent.state(), parameters={})
    memory = jax.tree.map(lambda leaf: jnp.stack([leaf] * ENVIRONMENTS), memory)
    credit, optimizer = braintrace.TDTrace(CREDIT), optax.adam(LEARNING_RATE)

    def live(life, _):
        value_before, reward, discount = life.before
        key, to_choose, to_act = jax.random.split(life.key, 3)
        keys = jax.random.split(to_choose, ENVIRONMENTS)
        gradients, (memory, actions, values) = choose_all(
            life.parameters, life.memory, life.worlds, keys, discount == 0
        )
        errors = reward + discount * values - value_before
        descent = credit.gradients(life.credit, errors)
        changes, moments = optimizer.update(descent, life.moments)
        parameters = optax.apply_updates(life.parameters, changes)
        trace = credit.update(life.credit, gradients, discount)
        keys = jax.random.split(to_act, ENVIRONMENTS)
        worlds, rewards, ended = jax.vmap(act_on)(life.worlds, actions, keys)
        before = values, rewards, jnp.where(ended, 0.0, DISCOUNT)
        earned = rewards.sum() / jnp.maximum(ended.sum(), 1)
        return Life(parameters, moments, memory, trace, worlds, before, key), (earned, ended.any())

    def train(parameters, key):
        key, to_begin = jax.random.split(key)
        worlds = jax.vmap(begin)(jax.random.split(to_begin, ENVIRONMENTS))
        zero = jnp.zeros(ENVIRONMENTS)
        traces = credit.init(parameters, batch_size=ENVIRONMENTS)
        life = Life(
            *(parameters, optimizer.init(parameters), memory, traces),
            *(worlds, (zero, zero, zero), key),
        )
        _, (earned, is_end) = jax.lax.scan(live, life, length=steps)
        is_late = is_end & (jnp.arange(steps) > 0.8 * steps)
        return jnp.where(is_late, earned, 0.0).sum() / is_late.sum()

    return train, initial


def returns(framework, rule, steps=4000, seeds=3):
    """Return the mean return of the last fifth of training, for each seed."""
    train, parameters = training(framework, rule, steps)
    keys = jax.random.split(jax.random.key(1), seeds)
    return jax.jit(jax.vmap(train, in_axes=(None, 0)))(parameters, keys)


def main(arguments=None):
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=NETWORKS, default="nnx")
    parser.add_argument("--steps", type=int, default=4000, help="updates of the parameters")
    options = parser.parse_args(arguments)
    brainstate.random.seed(0)
    for rule in ("d_rtrl", "immediate"):
        found = returns(options.framework, rule, options.steps)
        listed = ", ".join(f"{value:.2f}" for value in found)
        print(f"{rule}: mean return {found.mean():.2f} (seeds {listed}; at best 1, by chance 0)")


if __name__ == "__main__":
    main()
