"""The models, as steps that run with the library's operations and with plain JAX alike."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

import braintrace

FOLDER = Path(__file__).parent
INPUTS, UNITS, OUTPUTS = 3, 4, 2
BATCH, LENGTH = 3, 7


class Marked:
    """Operations of the library."""

    matmul = staticmethod(braintrace.matmul)
    element_wise = staticmethod(braintrace.element_wise)
    feedback = staticmethod(braintrace.feedback_matmul)


class Plain:
    """The same operations in plain JAX."""

    @staticmethod
    def matmul(x, weight, bias=None):
        return x @ weight if bias is None else x @ weight + bias

    @staticmethod
    def element_wise(weight):
        return weight

    @staticmethod
    def feedback(x, weight, feedback):
        held = jax.lax.stop_gradient(x)
        return held @ weight + (x - held) @ jax.lax.stop_gradient(feedback)


@dataclasses.dataclass(frozen=True, eq=False)
class Net:
    """A model.

    step: (ops, parameters, states, x) -> (new states, output).
    shapes: {parameter: shape}, in the names of `make.flat`.
    states: {state: number of units}.
    constants: {name: shape} of parameters that do not learn; `step` finds them with the others.
    exact: rules of which every path is the gradient of backpropagation through time.
    own_rule: parameters that have a rule of their own in the row `by path`.
    module: builds a module from the arrays, where the generic one would not show something.
    """

    name: str
    step: Callable
    shapes: Mapping[str, tuple[int, ...]]
    states: Mapping[str, int]
    exact: tuple[str, ...] = ()
    constants: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    own_rule: tuple[str, ...] = ("w_in",)
    module: Callable | None = None

    @property
    def file(self):
        return FOLDER / f"{self.name}.npz"

    @functools.cached_property
    def stored(self):
        """The arrays of the file."""
        with np.load(self.file, allow_pickle=False) as file:
            return dict(file)

    @functools.cached_property
    def inputs(self):
        """Everything that goes in: `p/` parameters and constants, `s/` initial states, data."""
        if self.file.exists():
            return {n: a for n, a in self.stored.items() if n not in ("rows", "values")}
        return draw(self)

    @functools.cached_property
    def rows(self):
        """{rule: {path: number of a row of `values`, or the name of an error}}."""
        return json.loads(str(self.stored["rows"]))

    def group(self, prefix):
        """{name: array} of those inputs that begin with a prefix."""
        return {n[len(prefix) :]: a for n, a in self.inputs.items() if n.startswith(prefix)}

    def build(self):
        """A new module with the stored numbers."""
        return self.module(self) if self.module else Module(self)


def draw(net):
    """New inputs, of few binary digits so that they take little room in a file."""
    random = np.random.default_rng(sum(map(ord, net.name)))

    def normal(shape, scale=1.0):
        return np.round(scale * random.standard_normal(shape) * 64) / 64

    found = {
        f"p/{name}": normal(shape, 1.5 * (shape[0] if len(shape) > 1 else 4) ** -0.5)
        for name, shape in {**net.shapes, **net.constants}.items()
    }
    found |= {f"s/{name}": normal((size,), 0.5) for name, size in net.states.items()}
    found["xs"] = normal((LENGTH, BATCH, INPUTS), 1.5)
    found["targets"] = normal((LENGTH, BATCH, OUTPUTS))
    found["mask"] = np.array([1, 0.5, 0, 1, 2, 0, 1.0])
    reset = np.zeros((LENGTH, BATCH), bool)
    reset[2, 0] = reset[4, :2] = reset[5, 2] = True
    found["reset"] = reset
    return found


class Module(brainstate.nn.Module):
    """A model as users write it."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        arrays = net.group("p/")
        for name in net.shapes:
            setattr(self, name, brainstate.ParamState(jnp.asarray(arrays[name])))
        self.constants = {name: jnp.asarray(arrays[name]) for name in net.constants}
        self.initial = {name: jnp.asarray(value) for name, value in net.group("s/").items()}

    def init_state(self, batch_size=None, **_):
        batch = () if batch_size is None else (batch_size,)
        for name, value in self.initial.items():
            value = jnp.broadcast_to(value, (*batch, *value.shape))
            setattr(self, name, brainstate.HiddenState(value))

    def update(self, x):
        parameters = {name: getattr(self, name).value for name in self.net.shapes}
        states = {name: getattr(self, name).value for name in self.net.states}
        new, output = self.net.step(Marked, parameters | self.constants, states, x)
        for name, value in new.items():
            getattr(self, name).value = value
        return output


# --- steps --------------------------------------------------------------------------------


@jax.custom_jvp
def spike(v):
    """One above zero, with a smooth surrogate derivative."""
    return (v >= 0).astype(v.dtype)


@spike.defjvp
def _spike_jvp(primals, tangents):
    (v,), (dv,) = primals, tangents
    return spike(v), dv / (1 + 2 * jnp.abs(v)) ** 2


@jax.custom_jvp
def triangle(v):
    """One above zero; the derivative is that of `braintrace.nn.surrogate.triangle`."""
    return (v >= 0).astype(v.dtype)


@triangle.defjvp
def _triangle_jvp(primals, tangents):
    (v,), (dv,) = primals, tangents
    return triangle(v), dv * 0.3 * jnp.maximum(0, 1 - jnp.abs(v))


def indrnn_step(ops, p, s, x):
    y = ops.matmul(x, p["w_in"], p["b"]) + ops.element_wise(p["u"]) * s["h"]
    return {"h": jnp.tanh(y)}, jnp.tanh(y) @ p["w_out"]


def two_indrnn_step(ops, p, s, x):
    h1 = jnp.tanh(ops.matmul(x, p["w_in"], p["b"]) + ops.element_wise(p["u1"]) * s["h1"])
    h2 = jnp.tanh(ops.matmul(h1, p["w_up"]) + ops.element_wise(p["u2"]) * s["h2"])
    return {"h1": h1, "h2": h2}, h2 @ p["w_out"]


def gru_step(ops, p, s, x):
    h = s["h"]
    r, z = jnp.split(jax.nn.sigmoid(ops.matmul(jnp.concatenate([x, h], -1), p["w_rz"])), 2, -1)
    n = jnp.tanh(ops.matmul(x, p["w_in"], p["b"]) + r * ops.matmul(h, p["w_rec"]))
    h = (1 - z) * h + z * n
    return {"h": h}, h @ p["w_out"]


def lstm_step(ops, p, s, x):
    y = ops.matmul(jnp.concatenate([x, s["h"]], -1), p["w_in"], p["b"])
    i, g, f, o = jnp.split(y, 4, -1)
    c = jax.nn.sigmoid(f + 1) * s["c"] + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return {"c": c, "h": h}, h @ p["w_out"]


def alif_step(ops, p, s, x):
    """Feed-forward where the parameters have no recurrent weight."""
    z = spike(s["V"] - 1 - 0.5 * s["a"])
    y = ops.matmul(x, p["w_in"])
    if "w_rec" in p:
        y += ops.matmul(z, p["w_rec"])
    new = {"V": 0.9 * s["V"] - z + y, "a": 0.95 * s["a"] + z}
    new["o"] = 0.8 * s["o"] + spike(new["V"] - 1 - 0.5 * new["a"]) @ p["w_out"]
    return new, new["o"]


def skip_step(ops, p, s, x):
    h1 = 0.7 * s["h1"] + 0.3 * jnp.tanh(ops.matmul(x, p["w_in"]) + ops.matmul(s["h1"], p["r1"]))
    h2 = 0.8 * s["h2"] + 0.2 * jnp.tanh(ops.matmul(h1, p["w_up"]) + ops.matmul(s["h2"], p["r2"]))
    return {"h1": h1, "h2": h2}, h2 @ p["w_out"] + h1 @ p["w_skip"]


def feedback_step(ops, p, s, x):
    drive = ops.matmul(x, p["w_in"]) + ops.matmul(s["h"], p["w_rec"], p["b"])
    h = 0.7 * s["h"] + 0.3 * jnp.tanh(drive)
    return {"h": h}, ops.feedback(h, p["w_out"], p["feedback"])


def units_step(ops, p, s, x):
    """The equations of `Units`: potentials in mV, times in ms."""
    z = triangle(s["neuron/V"] - 1 - 0.1 * s["neuron/a"])
    y = ops.matmul(x, p["dense/weight/weight"])
    fall = np.exp(-1 / 5.0)
    V = fall * (s["neuron/V"] - z) + (1 - fall) * y
    a = np.exp(-1 / 100.0) * s["neuron/a"] + z
    r = fall * s["readout/r"] + triangle(V - 1 - 0.1 * a) @ p["readout/W/weight/weight"]
    return {"neuron/V": V, "neuron/a": a, "readout/r": r}, r


class Units(brainstate.nn.Module):
    """Layers of `braintrace.nn` with physical units."""

    def __init__(self, net):
        super().__init__()
        arrays, start = net.group("p/"), net.group("s/")
        weight = jnp.asarray(arrays["dense/weight/weight"]) * u.mA
        self.dense = braintrace.nn.Linear(INPUTS, UNITS, w_init=weight, b_init=None)
        V, a = jnp.asarray(start["neuron/V"]) * u.mV, jnp.asarray(start["neuron/a"])
        self.neuron = braintrace.nn.ALIF(UNITS, V_initializer=V, a_initializer=a)
        out = jnp.asarray(arrays["readout/W/weight/weight"])
        self.readout = braintrace.nn.LeakyRateReadout(
            UNITS, OUTPUTS, w_init=out, r_initializer=jnp.asarray(start["readout/r"])
        )

    def update(self, x):
        with brainstate.environ.context(dt=1.0 * u.ms):
            return self.readout(self.neuron(self.dense(x)))


W_IN, W_OUT = {"w_in": (INPUTS, UNITS)}, {"w_out": (UNITS, OUTPUTS)}
BOTH = W_IN | W_OUT
SQUARE = (UNITS, UNITS)
SPIKING = {"V": UNITS, "a": UNITS, "o": OUTPUTS}
ALWAYS = ("rtrl",)
COUPLED = ("rtrl", "ostl_recurrent", "snap 2")
"""Rules that are exact for one layer in which every unit feeds every other one."""
FILTERED = ("rtrl", "d_rtrl", "eprop", "ostl_feedforward", "snap 1", "snap 2")
"""Rules that are exact for one layer without recurrent weights, below a leaky readout as well."""
ONE_LAYER = (*FILTERED, "ostl_recurrent")
"""Rules that are exact without a leaky readout; `ostl_recurrent` takes that for a second layer."""

NETS = {
    net.name: net
    for net in (
        Net(
            "indrnn",
            indrnn_step,
            {**BOTH, "b": (UNITS,), "u": (UNITS,)},
            {"h": UNITS},
            ONE_LAYER,
            own_rule=("w_in", "b"),
        ),
        Net(
            "two_indrnn",
            two_indrnn_step,
            {**BOTH, "b": (UNITS,), "w_up": SQUARE, "u1": (UNITS,), "u2": (UNITS,)},
            {"h1": UNITS, "h2": UNITS},
            ALWAYS,
            own_rule=("w_in", "b"),
        ),
        Net(
            "gru",
            gru_step,
            {**BOTH, "b": (UNITS,), "w_rec": SQUARE, "w_rz": (INPUTS + UNITS, 2 * UNITS)},
            {"h": UNITS},
            COUPLED,
            own_rule=("w_in", "b"),
        ),
        Net(
            "lstm",
            lstm_step,
            {"w_in": (INPUTS + UNITS, 4 * UNITS), "b": (4 * UNITS,), **W_OUT},
            {"c": UNITS, "h": UNITS},
            COUPLED,
            own_rule=("w_in", "b"),
        ),
        Net("alif", alif_step, {**BOTH, "w_rec": SQUARE}, SPIKING, ALWAYS),
        Net("alif_forward", alif_step, BOTH, SPIKING, FILTERED),
        Net(
            "skip",
            skip_step,
            {**BOTH, "r1": SQUARE, "r2": SQUARE, "w_up": SQUARE, "w_skip": (UNITS, OUTPUTS)},
            {"h1": UNITS, "h2": UNITS},
            ALWAYS,
        ),
        Net(
            "feedback",
            feedback_step,
            {**BOTH, "b": (UNITS,), "w_rec": SQUARE},
            {"h": UNITS},
            COUPLED,
            constants={"feedback": (UNITS, OUTPUTS)},
        ),
        Net(
            "units",
            units_step,
            {"dense/weight/weight": (INPUTS, UNITS), "readout/W/weight/weight": (UNITS, OUTPUTS)},
            {"neuron/V": UNITS, "neuron/a": UNITS, "readout/r": OUTPUTS},
            FILTERED,
            own_rule=("dense",),
            module=Units,
        ),
    )
}
