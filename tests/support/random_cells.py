"""Random recurrent cells, grown from a small grammar.

A cell is a program: a list of instructions on a stack of ``(BATCH, UNITS)`` values that starts
with the old states and a first marked drive. Every instruction takes operands by index (modulo
the size of the stack) and pushes its result. The last values become the new states.
"""

from dataclasses import dataclass

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from catalogue import Model
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from marks import spike
from matrices import csr

import braintrace

BATCH, INPUTS, UNITS, OUTPUTS = 2, 3, 4, 2
HALF = UNITS // 2
ROTATION = np.linspace(-0.6, 0.6, UNITS * UNITS).reshape(UNITS, UNITS)

ELEMENTWISE = {
    "tanh": lambda a, b: jnp.tanh(a),
    "sigmoid": lambda a, b: jax.nn.sigmoid(a),
    "add": lambda a, b: 0.6 * a + 0.5 * b,
    "multiply": lambda a, b: a * b,
    "gate": lambda a, b: jax.nn.sigmoid(a) * b,
    "select": lambda a, b: jnp.where(a > 0.1, a, 0.5 * b),
    "square": lambda a, b: 0.3 * a**2,
    "relu": lambda a, b: jax.nn.relu(a + 0.1) + 0.2 * b,
    "spike": lambda a, b: 0.3 * spike(a),
    "einsum": lambda a, b: jnp.einsum("bh,bh->bh", a, b),
    "loop": lambda a, b: _small_steps(a, b),
    "branch": lambda a, b: jax.lax.cond(a.sum() > 0, jnp.tanh, lambda a: 0.5 * a, a) + 0.1 * b,
}


def _small_steps(a, b):
    def step(carry, _):
        return carry + 0.1 * (jnp.tanh(b) - carry), None

    return jax.lax.scan(step, a, None, length=4)[0]


MOVES = {
    "halves": lambda a, b: jnp.concatenate([a[:, :HALF], b[:, HALF:]], -1),
    "half scaled": lambda a, b: jnp.concatenate([0.5 * a[:, :HALF], a[:, HALF:]], -1),
    "there and back": lambda a, b: (0.8 * a.T).reshape(2, HALF, BATCH).reshape(UNITS, BATCH).T,
    "stacked": lambda a, b: jnp.stack([a, b], -1).sum(-1),
    "interleaved": lambda a, b: (jnp.stack([a, b], 1) * 0.7)[:, 1],
    "padded": lambda a, b: jnp.pad(a[:, 1:], ((0, 0), (1, 0))),
    "pairs": lambda a, b: a.reshape(BATCH, HALF, 2).max(-1).repeat(2, axis=-1) + b,
    "pooled": lambda a, b: b + jnp.pad(_pooled(a), ((0, 0), (0, HALF))),
    "stopped": lambda a, b: jax.lax.stop_gradient(a) + 0.5 * b,
}


def _pooled(a):
    return jax.lax.reduce_window(a, 0.0, jax.lax.add, (1, 2), (1, 2), "VALID")


MIXING = {
    "roll": lambda a, b: jnp.roll(a, 1, axis=-1),
    "flip": lambda a, b: a[:, ::-1],
    "mirror": lambda a, b: 0.6 * b - 0.4 * jnp.flip(a, -1),
    "shift": lambda a, b: b.at[:, 1:].add(0.3 * a[:, :-1]),
    "swap": lambda a, b: jnp.concatenate([a[:, HALF:], a[:, :HALF]], -1),
    "mean": lambda a, b: b - a.mean(-1, keepdims=True),
    "dot": lambda a, b: 0.5 * a @ jnp.asarray(ROTATION, a.dtype),
    "sum over batch": lambda a, b: b + 0.1 * a.sum(0, keepdims=True),
    "max": lambda a, b: a - a.max(-1, keepdims=True),
    "cumsum": lambda a, b: 0.4 * jnp.cumsum(a, -1),
}
PLAIN = {**ELEMENTWISE, **MOVES, **MIXING}
MARKED = (
    *("input", "recurrent", "gain", "shared gain", "fused", "column", "bias"),
    *("halves of signs", "low rank", "sparse", "convolution"),
)
CONNECTED = csr(jnp.asarray([[1.0, 0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1]]))


@dataclass(frozen=True)
class Program:
    """A random cell.

    states: number of hidden states.
    instructions: ``(name, index of a, index of b)``.
    """

    states: int
    instructions: tuple[tuple[str, int, int], ...]


@st.composite
def programs(draw):
    """Half of the programs have no instruction that couples elements."""
    kinds = [*ELEMENTWISE, *ELEMENTWISE, *MOVES, *draw(st.sampled_from([[], list(MIXING)]))]
    instruction = st.tuples(
        st.sampled_from([*kinds, *MARKED]), st.integers(0, 9), st.integers(0, 9)
    )
    states = draw(st.integers(1, 3))
    return Program(states, tuple(draw(st.lists(instruction, min_size=3, max_size=9))))


def random_programs(count):
    """Call a function with random programs, the same ones at every run."""
    same = settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    return lambda check: same(given(programs())(check))


class RandomCell(brainstate.nn.Module):
    """A program as a brainstate model; every ETP operation has a parameter of its own."""

    def __init__(self, program):
        super().__init__()
        self.program = program
        generator = np.random.default_rng(11)

        def parameter(*shape):
            values = generator.standard_normal(shape) / np.sqrt(shape[0])
            return brainstate.ParamState(jnp.asarray(values, float))

        shapes = {
            "input": (INPUTS, UNITS),
            "recurrent": (UNITS, UNITS),
            "gain": (UNITS,),
            "shared gain": (1,),
            "fused": (INPUTS, 2 * UNITS),
            "column": (INPUTS, 1),
            "bias": (BATCH, UNITS),
            "halves of signs": (INPUTS, HALF),
            "low rank": (INPUTS, UNITS),
            "sparse": (6,),
            "convolution": (2, 1, 1),
        }
        self.first = parameter(INPUTS, UNITS)
        self.w_out = parameter(UNITS, OUTPUTS)
        for number, (name, _, _) in enumerate(program.instructions):
            if name in shapes:
                setattr(self, f"w{number}", parameter(*shapes[name]))

    def init_state(self, batch_size=None, **_):
        for index in range(self.program.states):
            values = np.linspace(-0.4, 0.5 + 0.1 * index, batch_size * UNITS)
            value = jnp.asarray(values.reshape(batch_size, UNITS), float)
            setattr(self, f"h{index}", brainstate.HiddenState(value))

    def update(self, x):
        states = [getattr(self, f"h{index}") for index in range(self.program.states)]
        stack = [state.value for state in states]
        drive = braintrace.matmul(x, self.first.value)
        stack.append(drive)
        for number, (name, i, j) in enumerate(self.program.instructions):
            a, b = stack[-1 - i % len(stack)], stack[-1 - j % len(stack)]
            stack.append(
                PLAIN[name](a, b) if name in PLAIN else self._marked(name, number, x, a, b)
            )
        for index, state in enumerate(states):
            state.value = 0.5 * state.value + 0.4 * jnp.tanh(stack[-1 - index]) + 0.2 * drive
        return sum(state.value for state in states) @ self.w_out.value

    def _marked(self, name, number, x, a, b):
        weight = getattr(self, f"w{number}").value
        if name in ("gain", "shared gain", "bias"):
            return braintrace.element_wise(weight, jnp.tanh) * a
        if name == "halves of signs":
            y = braintrace.matmul(x, weight)
            return jnp.concatenate([jax.nn.relu(y), jax.nn.softplus(-y)], -1) + 0.3 * a
        if name == "low rank":
            return braintrace.lora_matmul(x, weight[:, :2], weight[:2, :]) + 0.3 * a
        if name == "sparse":
            return braintrace.sparse_matmul(x, weight, sparse_mat=CONNECTED) * a
        if name == "convolution":
            layout = ("NWC", "WIO", "NWC")
            y = braintrace.conv(x[:, :, None], weight, dimension_numbers=layout)
            return jnp.pad(y[:, :, 0], ((0, 0), (0, UNITS - INPUTS))) + 0.3 * a
        y = braintrace.matmul(a if name == "recurrent" else x, weight)
        if name == "fused":
            return jax.nn.sigmoid(y[:, :UNITS]) * a + y[:, UNITS:]
        return y * a + b if name == "column" else y + 0.3 * a


def chunk_size(program):
    """Of its sequences of six steps: of every other cell, the last chunk is a shorter one."""
    return 3 + len(program.instructions) % 2


def entry_of(program):
    """The cell as a model of the catalogue, of which nothing is known."""
    return Model(
        "random cell",
        lambda: RandomCell(program),
        (),
        (),
        frozenset(),
        shape=(BATCH, INPUTS),
    )
