"""Train an actor-critic online in partially observed environments.

Two environments of gymnax hide a part of the state. The memory chain shows a sign and asks for it
twenty steps later; the pole on a cart shows noisy positions without velocities. Actor and critic
are one network with recurrent units, updated at every step, without replay, rollouts or
backpropagation through time. D-RTRL traces carry gradients through the memory of the network; a
`TDTrace` credits earlier predictions and actions with later rewards.

The baselines are the same network with truncated BPTT(1), whose gradients see one step of the
recurrence, and the same network with a reset at every step.

    pip install -e ".[examples]" gymnax six
    python docs/examples/actor_critic.py               three seeds, within two minutes on two cores
    python docs/examples/actor_critic.py --seeds 10    within five
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import brainstate
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

import braintrace

ENVIRONMENTS, UNITS = 16, 32
LEARNING_RATE, DECAY = 3e-3, 0.9
POINTS = 10


# --- environments ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class World:
    """An environment with its observations and settings.

    discount: of rewards, per step.
    reward_scale: factor of rewards, so that values are about 1.
    see: function of an observation and a key for noise.
    longest_memory: largest initial radius of the recurrent units.
    """

    title: str
    environment: Any
    parameters: Any
    see: Callable[[jax.Array, jax.Array], jax.Array]
    inputs: int
    steps: int
    discount: float
    reward_scale: float
    longest_memory: float


def memory_chain(length=20, steps=8000):
    """Show a sign and ask for it later: the return is 1 if correct, and -1 otherwise."""
    environment, parameters = gymnax.make("MemoryChain-bsuite")
    parameters = dataclasses.replace(parameters, memory_length=length)
    return World(
        f"memory chain of {length} steps",
        environment,
        parameters,
        see=lambda x, key: x,
        inputs=3,
        steps=steps,
        discount=0.99,
        reward_scale=1.0,
        longest_memory=0.8,
    )


def masked_cartpole(noise=0.15, steps=6000):
    """Balance a pole for 500 steps by noisy positions: the reward is 1 per step."""
    environment, parameters = gymnax.make("CartPole-v1")
    limits = jnp.array([parameters.x_threshold, parameters.theta_threshold_radians])

    def positions(x, key):
        return x[jnp.array([0, 2])] / limits + noise * jax.random.normal(key, (2,))

    return World(
        "pole on a cart, without velocities",
        environment,
        parameters,
        see=positions,
        inputs=2,
        steps=steps,
        discount=0.95,
        reward_scale=0.05,
        longest_memory=0.5,
    )


# --- agents ------------------------------------------------------------------------------


class ActorCritic(brainstate.nn.Module):
    """Linear recurrent trace units, a layer of tanh units, and two readouts."""

    def __init__(self, inputs, actions, longest_memory):
        super().__init__()
        self.memory = braintrace.nn.RTUCell(
            inputs, UNITS, r_max=longest_memory, activation=lambda h: h
        )
        self.hidden = brainstate.nn.Linear(UNITS, UNITS)
        zeros = brainstate.nn.init.ZeroInit()
        self.policy = brainstate.nn.Linear(UNITS, actions, w_init=zeros)
        self.value = brainstate.nn.Linear(UNITS, 1, w_init=zeros)

    def update(self, x):
        h = jnp.tanh(self.hidden(self.memory(x)))
        return self.policy(h), self.value(h)[0]


class Agent(NamedTuple):
    name: str
    rule: str
    forgets: bool
    color: str


AGENTS = {
    "d_rtrl": Agent("D-RTRL", "d_rtrl", False, "tab:blue"),
    "bptt1": Agent("BPTT(1)", "immediate", False, "tab:orange"),
    "forgetful": Agent("no memory", "immediate", True, "tab:gray"),
}


class Past(NamedTuple):
    """Values of the last step that its error needs, per environment.

    discount: 0 where an episode has ended.
    is_cut: whether the time limit ended it, so that later rewards are unknown.
    """

    trace: Any
    value: jax.Array
    reward: jax.Array
    discount: jax.Array
    is_cut: jax.Array


class Life(NamedTuple):
    """State that is carried from step to step."""

    parameters: Any
    optimizer: Any
    memory: Any
    past: Past
    world: Any
    observation: jax.Array
    earned: jax.Array
    key: jax.Array


def act_once(pure, world, parameters, memory, observation, key, is_new):
    """Return what an agent differentiates, its state, action and value, in one environment."""
    to_see, to_choose = jax.random.split(key)
    state = pure.reset(dataclasses.replace(memory, parameters=parameters), where=is_new)
    state, (logits, value) = pure.step(state, world.see(observation, to_see))
    action = jax.random.categorical(to_choose, logits)
    chosen = jax.nn.log_softmax(logits)[action]
    return value + chosen, (dataclasses.replace(state, parameters={}), action, value)


def make_live(pure, world, agent):
    """Return training as a function of initial parameters and a key."""
    credit = braintrace.TDTrace(DECAY)
    optimizer = optax.adam(optax.linear_schedule(LEARNING_RATE, 0.0, world.steps))
    fresh_memory = dataclasses.replace(pure.state(), parameters={})
    fresh_memory = jax.tree.map(lambda leaf: jnp.stack([leaf] * ENVIRONMENTS), fresh_memory)
    differentiate = jax.grad(functools.partial(act_once, pure, world), has_aux=True)
    act = jax.vmap(differentiate, in_axes=(None, 0, 0, 0, 0))
    enter = jax.vmap(world.environment.reset, in_axes=(0, None))
    move = jax.vmap(world.environment.step, in_axes=(0, 0, 0, None))

    def step(life, _):
        parameters, moments, memory, past, state, seen, earned, key = life
        key, *keys = jax.random.split(key, 3)
        to_act, to_move = (jax.random.split(k, ENVIRONMENTS) for k in keys)

        is_new = (past.discount == 0) | agent.forgets
        gradients, (memory, action, value) = act(parameters, memory, seen, to_act, is_new)
        errors = past.reward + past.discount * value - past.value
        descent = credit.gradients(past.trace, jnp.where(past.is_cut, 0.0, errors))
        changes, moments = optimizer.update(descent, moments)
        parameters = optax.apply_updates(parameters, changes)
        trace = credit.update(past.trace, gradients, past.discount)

        seen, state, reward, is_over, is_cut, _ = move(to_move, state, action, world.parameters)
        has_ended = is_over | is_cut
        discount = jnp.where(has_ended, 0.0, world.discount)
        past = Past(trace, value, world.reward_scale * reward, discount, is_cut & ~is_over)
        earned = earned + reward
        ended = jnp.sum(has_ended * earned), jnp.sum(has_ended)
        earned = jnp.where(has_ended, 0.0, earned)
        return Life(parameters, moments, memory, past, state, seen, earned, key), ended

    def live(parameters, key):
        key, to_enter = jax.random.split(key)
        seen, state = enter(jax.random.split(to_enter, ENVIRONMENTS), world.parameters)
        zeros = jnp.zeros(ENVIRONMENTS)
        past = Past(credit.init(parameters, ENVIRONMENTS), zeros, zeros, zeros, zeros > 0)
        moments = optimizer.init(parameters)
        life = Life(parameters, moments, fresh_memory, past, state, seen, zeros, key)
        return jax.lax.scan(step, life, length=world.steps)[1]

    return live


def train(world, agent, seeds):
    """Return the mean return of episodes by part of training, ``(seeds, POINTS)``."""
    actions = world.environment.num_actions

    def build(seed):
        brainstate.random.seed(seed)
        return ActorCritic(world.inputs, actions, world.longest_memory)

    learner = braintrace.compile(build(0), agent.rule, jnp.zeros(world.inputs))
    weights = [build(seed).states(brainstate.ParamState) for seed in range(seeds)]
    begun = [{path: weight.value for path, weight in own.items()} for own in weights]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *begun)
    live = jax.jit(jax.vmap(make_live(learner.functional(), world, agent)))
    returns, ended = live(stack, jax.random.split(jax.random.key(0), seeds))
    parts = (np.asarray(x).reshape(seeds, POINTS, -1).sum(-1) for x in (returns, ended))
    return np.divide(*parts)


# --- results -----------------------------------------------------------------------------


def score(curves):
    """Return the mean return in the second half of training, per seed."""
    return curves[:, POINTS // 2 :].mean(axis=1)


def table(world, curves_of):
    """Return the scores as text."""
    seeds = len(next(iter(curves_of.values())))
    head = [f"{world.title}, return in the second half", *map("seed {}".format, range(seeds))]
    lines = ["".join([f"{head[0]:48}", *(f"{name:>9}" for name in head[1:]), f"{'mean':>9}"])]
    for name, curves in curves_of.items():
        scores = score(curves)
        numbers = (f"{x:9.2f}" for x in (*scores, scores.mean()))
        lines.append("".join([f"{AGENTS[name].name:48}", *numbers]))
    return "\n".join(lines)


def draw(results, path):
    """Plot the learning curves of all agents in all environments."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (world, curves_of) in zip(figure.subplots(1, 2), results, strict=True):
        steps = (np.arange(POINTS) + 0.5) * world.steps / POINTS
        for name, curves in curves_of.items():
            agent = AGENTS[name]
            axes.plot(steps, curves.T, color=agent.color, alpha=0.3, linewidth=0.8)
            axes.plot(steps, curves.mean(axis=0), color=agent.color, label=agent.name)
        axes.set(xlabel="update", ylabel="return of an episode", title=world.title)
        axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main(arguments=None):
    """Run the example; return the curves of each agent in each environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="lives of every agent")
    parser.add_argument("--noise", type=float, default=0.15, help="error of the pole's positions")
    parser.add_argument("--out", type=Path, default="actor_critic.png", help="the picture")
    options = parser.parse_args(arguments)
    results = []
    for world in (memory_chain(), masked_cartpole(options.noise)):
        curves_of = {}
        for name, agent in AGENTS.items():
            start = time.perf_counter()
            curves_of[name] = train(world, agent, options.seeds)
            print(f"{world.title}, {agent.name}: {time.perf_counter() - start:.0f} s", flush=True)
        results.append((world, curves_of))
    print(*(table(*result) for result in results), sep="\n\n")
    draw(results, options.out)
    return results


if __name__ == "__main__":
    main()
