"""Models of the catalogue whose weights reach their states on unusual ways."""

import dataclasses

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from marks import mixing, spike

import braintrace

from .model import BATCH, INPUTS, OUTPUTS, Cell, H, model, start

W_IN, W_REC, W_OUT = (INPUTS, H), (H, H), (H, OUTPUTS)
sigmoid = jax.nn.sigmoid


# --- one output, several positions ----------------------------------------------------------


@model("w -> h", groups="h", diagonal=True)
class SignedHalves(Cell):
    """The positive part of the drive goes to one half of the state, the negative to the other."""

    weights = {"w": (INPUTS, H // 2), "w_out": W_OUT}
    states_of = {"h": (H,)}

    def update(self, x):
        y = braintrace.matmul(x, self.w.value)
        halves = jnp.concatenate([jax.nn.relu(y), jax.nn.softplus(-y)], -1)
        self.h.value = 0.8 * self.h.value + halves
        return self.h.value @ self.w_out.value


@model("w -> h", "scale -> h", groups="h", diagonal=True, tested={"d_rtrl": ("own gradient",)})
class LateralDrive(Cell):
    """A unit is driven by its own output, its neighbour's and its mirror image's."""

    weights = {"w": W_IN, "scale": (H,), "w_out": W_OUT}
    states_of = {"h": (H,)}

    def update(self, x):
        y = braintrace.matmul(x, self.w.value)
        spread = y.at[:, 1:].add(0.3 * y[:, :-1])
        gain = jax.nn.softplus(braintrace.element_wise(self.scale.value))
        kept = 0.4 * jnp.tanh(gain) * self.h.value - 0.2 * jnp.flip(gain)
        self.h.value = kept + spread - 0.5 * jnp.tanh(jnp.flip(y, -1))
        return self.h.value @ self.w_out.value


@model("w_k -> S", "w_v -> S", groups="S", diagonal=True, tested={"d_rtrl": ("chunks of 3",)})
class FastWeights(Cell):
    """Linear attention: a matrix of keys and values that decays."""

    weights = {"w_k": W_IN, "w_v": (INPUTS, 3), "w_out": W_OUT}
    states_of = {"S": (H, 3)}

    def update(self, x):
        key = jnp.tanh(braintrace.matmul(x, self.w_k.value))
        value = braintrace.matmul(x, self.w_v.value)
        self.S.value = 0.9 * self.S.value + jnp.einsum("bh,bk->bhk", key, value)
        return jnp.einsum("bhk,bk->bh", self.S.value, x) @ self.w_out.value


@model(
    "kernel -> h", groups="h", diagonal=True, shape=(BATCH, 4, 2), tested={"d_rtrl": ("stream",)}
)
class PooledConvolution(Cell):
    weights = {"kernel": (3, 2, 3), "w_out": (6, OUTPUTS)}
    states_of = {"h": (2, 3)}

    def update(self, x):
        y = braintrace.conv(x, self.kernel.value, dimension_numbers=("NWC", "WIO", "NWC"))
        window = (1, 2, 1)
        mean = jax.lax.reduce_window(y, 0.0, jax.lax.add, window, window, "VALID") / 2
        peak = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, window, window, "VALID")
        self.h.value = 0.7 * self.h.value + jnp.tanh(mean) + 0.3 * peak
        return self.h.value.reshape(BATCH, -1) @ self.w_out.value


# --- plain mixing next to a path of its own -------------------------------------------------


@model(
    "w -> h",
    groups="h",
    diagnostics=("truncated, warning",),
    spiking=True,
    tested={"immediate": ("chunks of 6",)},
)
class LateralInhibition(Cell):
    """A spike resets its own neuron, which is traced, and inhibits the next, which is not."""

    weights = {"w": W_IN, "w_out": W_OUT}
    states_of = {"h": (H,)}
    gain = 2.5

    def update(self, x):
        z = spike(self.h.value - 0.3)
        drive = braintrace.matmul(x, self.w.value)
        self.h.value = 0.8 * self.h.value - z - 0.3 * mixing(jnp.roll(z, 1, -1)) + drive
        return self.h.value @ self.w_out.value


# --- loops, callbacks, delays ---------------------------------------------------------------


@model(
    "w -> h",
    "leak -> h",
    groups="h",
    diagonal=True,
    tested={"d_rtrl": ("own gradient",), "snap": ("chunks of 4",)},
)
class LeakInInnerLoops(Cell):
    """A leak per unit that inner loops of small steps use for the whole batch."""

    weights = {"w": W_IN, "leak": (H,), "w_out": W_OUT}
    states_of = {"h": (H,)}

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value)
        leak = braintrace.element_wise(self.leak.value, sigmoid)

        def small_step(h, _):
            return h + 0.1 * (jnp.tanh(drive) - leak * h), None

        self.h.value, _ = jax.lax.scan(small_step, self.h.value, None, length=20)
        return self.h.value @ self.w_out.value


@model(
    "w -> v",
    "leak -> v",
    groups="v",
    diagnostics=("truncated, warning",),
    tested={"es_d_rtrl": ("stream",), "ottt": ("chunks of 1",)},
)
class CoupledCompartments(Cell):
    """Small steps of a cable: each compartment has a way of its own, and one to its neighbours."""

    weights = {"w": W_IN, "leak": (H,), "w_out": W_OUT}
    states_of = {"v": (H,)}

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value)
        leak = braintrace.element_wise(self.leak.value, sigmoid)

        def small_step(_):
            v = self.v.value
            axial = mixing(jnp.roll(v, 1, -1) + jnp.roll(v, -1, -1))
            self.v.value = (0.6 - 0.2 * leak) * v + 0.2 * jnp.tanh(drive) + 0.2 * axial

        brainstate.transform.for_loop(small_step, np.arange(3))
        return self.v.value @ self.w_out.value


@model("w -> h", groups="h", diagonal=True, tested={"d_rtrl": ("stream",)})
class RoundedFeedback(Cell):
    """A function outside JAX looks at the state, off the gradient path."""

    weights = {"w": W_IN, "w_out": W_OUT}
    states_of = {"h": (H,)}

    def update(self, x):
        held = jax.lax.stop_gradient(self.h.value)
        rounded = jax.pure_callback(_rounded, jax.ShapeDtypeStruct(held.shape, held.dtype), held)
        drive = braintrace.matmul(x, self.w.value)
        self.h.value = 0.8 * self.h.value + drive - 0.2 * rounded
        return self.h.value @ self.w_out.value


def _rounded(value):
    return np.round(np.asarray(value))


class Delayed(Cell):
    weights = {"w_in": W_IN, "w_rec": W_REC, "w_out": W_OUT}
    states_of = {"h": (H,)}

    def __init__(self):
        super().__init__()
        with brainstate.environ.context(dt=1.0):
            target = jax.ShapeDtypeStruct((H,), jnp.zeros(()).dtype)
            self.delay = brainstate.nn.Delay(target, entries={"late": 2.0}, time=2.0)

    def update(self, x):
        with brainstate.environ.context(dt=1.0):
            self.h.value = self.step(x, self.delay.at("late"))
            self.delay.update(self.h.value)
        return self.h.value @ self.w_out.value


@model(
    "w_in -> h",
    "w_rec -> h",
    groups="h",
    diagnostics=("truncated",),
    tested={"d_rtrl": ("chunks of 4",)},
)
class DelayedRecurrence(Delayed):
    """The recurrent input is two steps old: its weight learns, the delay line has no trace."""

    def step(self, x, late):
        drive = braintrace.matmul(x, self.w_in.value)
        recurrent = braintrace.matmul(late + 0.1 * self.h.value, self.w_rec.value)
        return 0.8 * self.h.value + jnp.tanh(drive + recurrent)


@model("w_in -> h", "w_rec -> h", groups="h", diagnostics=("untraced-state, warning",))
class DelayedSelfInhibition(Delayed):
    """A unit inhibits itself two steps later, past every trace: a warning."""

    def step(self, x, late):
        drive = braintrace.matmul(x, self.w_in.value)
        drive = drive + braintrace.matmul(x, self.w_rec.value[:INPUTS])
        return 0.8 * self.h.value + jnp.tanh(drive) - 0.2 * late


@model("w -> h", groups="h", diagnostics=("untraced-state, warning",))
class FilteredReadout(Cell):
    """A readout that is kept in a `ShortTermState` filters what the traces cannot follow."""

    weights = {"w": W_IN, "w_out": W_OUT}
    states_of = {"h": (H,)}

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.filtered = brainstate.ShortTermState(start((batch_size, OUTPUTS)))
        self.count = brainstate.ShortTermState(jnp.zeros((), int))

    def update(self, x):
        on = (self.count.value + np.arange(H)) % 3 != 0
        self.count.value = self.count.value + 1
        self.h.value = 0.8 * self.h.value + jnp.where(on, braintrace.matmul(x, self.w.value), 0.0)
        output = self.h.value @ self.w_out.value
        self.filtered.value = 0.6 * self.filtered.value + output
        return self.filtered.value


# --- parameters -----------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weights:
    matrix: jax.Array
    bias: jax.Array


@model("both -> h", "half,factor -> h", groups="h", diagonal=True)
class DataclassAndProduct(Cell):
    """Parameters in a dataclass; a product of two parameters."""

    weights = {"factor": (), "w_out": W_OUT}
    states_of = {"h": (H,)}

    def __init__(self):
        super().__init__()
        generator = np.random.default_rng(4)
        matrix, half = generator.standard_normal((2, *W_IN)) / 2
        both = Weights(jnp.asarray(matrix, float), jnp.linspace(-0.5, 0.5, H))
        self.both = brainstate.ParamState(both)
        self.half = brainstate.ParamState(jnp.asarray(half, float))

    def update(self, x):
        both = self.both.value
        drive = braintrace.matmul(x, both.matrix, both.bias)
        drive = drive + braintrace.matmul(x, self.half.value * self.factor.value)
        self.h.value = 0.8 * self.h.value + jnp.tanh(drive)
        return self.h.value @ self.w_out.value


@model("w_rec -> h", "w_in -> h", groups=("h", "line"), diagnostics=("truncated",))
class DelayLineForAMarkedOperation(Cell):
    """A shift register of hidden states that the recurrent weight alone reads: nothing is lost."""

    weights = {"w_in": W_IN, "w_rec": W_REC, "w_out": W_OUT}
    states_of = {"h": (H,), "line": (3, H)}

    def update(self, x):
        late = self.line.value
        recurrent = braintrace.matmul(late[:, -1], self.w_rec.value)
        drive = braintrace.matmul(x, self.w_in.value)
        self.h.value = 0.8 * self.h.value + jnp.tanh(drive + recurrent)
        kept = mixing(self.h.value)[:, None]
        self.line.value = jnp.concatenate([kept, mixing(late[:, :-1])], 1)
        return self.h.value @ self.w_out.value


@model("w_rec -> h", "w_in -> h", groups=("h", "ring"), diagnostics=("truncated",))
class RingForAMarkedOperation(DelayLineForAMarkedOperation):
    """The same, written to one place after the other."""

    states_of = {"h": (H,), "ring": (3, H)}

    def init_state(self, batch_size=None, **_):
        super().init_state(batch_size)
        self.at = brainstate.ShortTermState(jnp.zeros((), int))

    def update(self, x):
        recurrent = braintrace.matmul(self.ring.value[:, self.at.value], self.w_rec.value)
        drive = braintrace.matmul(x, self.w_in.value)
        self.h.value = 0.8 * self.h.value + jnp.tanh(drive + recurrent)
        kept = mixing(self.h.value)
        self.ring.value = self.ring.value.at[:, self.at.value].set(kept)
        self.at.value = (self.at.value + 1) % 3
        return self.h.value @ self.w_out.value
