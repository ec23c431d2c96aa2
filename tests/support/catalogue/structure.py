"""Models of the catalogue that are unusual in their structure: weights, control flow, layouts."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace

from .model import BATCH, INPUTS, OUTPUTS, Cell, H, model, start

W_IN, W_REC, W_OUT = (INPUTS, H), (H, H), (H, OUTPUTS)


# --- weights --------------------------------------------------------------------------------


@model("w -> h", "w -> k", groups=("h", "k"), diagnostics=("truncated",))
class TiedTranspose(Cell):
    weights = {"w": W_IN, "w_out": (INPUTS, OUTPUTS)}
    states_of = {"h": (H,), "k": (INPUTS,)}

    def update(self, x):
        self.h.value = 0.8 * self.h.value + jnp.tanh(braintrace.matmul(x, self.w.value))
        back = braintrace.matmul(self.h.value, self.w.value.T)
        self.k.value = 0.5 * jnp.tanh(self.k.value) + back
        return self.k.value @ self.w_out.value


@model("w -> h", "w -> h", groups="h", diagonal=True, tested={"d_rtrl": ("stream",)})
class OneWeightTwice(Cell):
    weights = {"w": W_IN, "w_out": W_OUT}
    states_of = {"h": (H,)}

    def update(self, x):
        drive = jnp.tanh(braintrace.matmul(x, self.w.value))
        gate = jax.nn.sigmoid(braintrace.matmul(jnp.abs(x), self.w.value))
        self.h.value = (0.5 + 0.4 * gate) * self.h.value + drive
        return self.h.value @ self.w_out.value


@model("w -> h", groups="h", diagonal=True, tested={"d_rtrl": ("chunks of 1",)})
class MarkedAndPlain(Cell):
    """One parameter in an ETP operation and, past the state, in a plain one."""

    weights = {"w": W_IN, "w_out": W_OUT}
    states_of = {"h": (H,)}

    def update(self, x):
        self.h.value = 0.8 * self.h.value + braintrace.matmul(x, self.w.value)
        return (self.h.value + jnp.tanh(x @ self.w.value)) @ self.w_out.value


MASK = np.indices(W_IN).sum(0) % 2 == 0


@model(
    "masked,sign -> h",
    "soft -> h",
    "normalised,scale -> h",
    groups="h",
    diagonal=True,
    tested={"d_rtrl": ("own gradient",)},
)
class WeightFunctions(Cell):
    weights = {
        "masked": W_IN,
        "sign": (H,),
        "soft": W_IN,
        "normalised": W_IN,
        "scale": (H,),
        "w_out": W_OUT,
    }
    states_of = {"h": (H,)}

    def update(self, x):
        signed = jnp.abs(self.masked.value) * MASK * jnp.tanh(self.sign.value)
        direction = self.normalised.value
        length = jnp.sqrt((direction**2).sum(0, keepdims=True))
        drive = braintrace.matmul(x, signed)
        drive = drive + braintrace.matmul(x, jax.nn.softplus(self.soft.value))
        drive = drive + braintrace.matmul(x, self.scale.value * direction / length)
        self.h.value = 0.8 * self.h.value + jnp.tanh(drive)
        return self.h.value @ self.w_out.value


@model(
    "params -> h",
    "params -> h",
    groups="h",
    diagonal=True,
    tested={"d_rtrl": ("chunks of 6",)},
)
class NestedParameters(Cell):
    weights = {
        "params": {"layer": {"w": W_IN, "b": (H,)}, "leak": [(H,)], "out": W_OUT},
    }
    states_of = {"h": (H,)}

    def update(self, x):
        params = self.params.value
        leak = braintrace.element_wise(params["leak"][0], jax.nn.sigmoid)
        drive = braintrace.matmul(x, params["layer"]["w"], params["layer"]["b"])
        self.h.value = leak * self.h.value + jnp.tanh(drive)
        return self.h.value @ params["out"]


@model(
    "big -> h",
    "big -> h",
    groups="h",
    diagnostics=("truncated",),
    tested={"d_rtrl": ("stream",)},
)
class SlicesOfOneParameter(Cell):
    weights = {"big": (INPUTS + H, H), "w_out": W_OUT}
    states_of = {"h": (H,)}

    def update(self, x):
        drive = braintrace.matmul(x, self.big.value[:INPUTS])
        recurrent = braintrace.matmul(self.h.value, self.big.value[INPUTS:])
        self.h.value = 0.6 * self.h.value + jnp.tanh(drive + recurrent)
        return self.h.value @ self.w_out.value


# --- control flow ---------------------------------------------------------------------------


@model(
    "w -> h",
    "w -> h",
    "w -> h",
    groups="h",
    diagonal=True,
    shape=(3, BATCH, INPUTS),
    tested={"d_rtrl": ("chunks of 4",)},
)
class MultiRate(Cell):
    """Three input frames a step, taken up in an inner loop with the ETP operation."""

    weights = {"w": W_IN, "w_out": W_OUT}
    states_of = {"h": (H,)}

    def update(self, frames):
        def sub_step(frame):
            drive = jnp.tanh(braintrace.matmul(frame, self.w.value))
            self.h.value = 0.9 * self.h.value + 0.3 * drive

        brainstate.transform.for_loop(sub_step, frames)
        return self.h.value @ self.w_out.value


@model(
    "w_night -> h", "w_day -> h", groups="h", diagonal=True, tested={"d_rtrl": ("own gradient",)}
)
class GatedByCond(Cell):
    weights = {"w_day": W_IN, "w_night": W_IN, "w_out": W_OUT}
    states_of = {"h": (H,)}

    def update(self, x):
        drive = brainstate.transform.cond(
            x.mean() > 0,
            lambda x: jnp.tanh(braintrace.matmul(x, self.w_day.value)),
            lambda x: 0.5 * braintrace.matmul(x, self.w_night.value),
            x,
        )
        self.h.value = 0.8 * self.h.value + drive
        return self.h.value @ self.w_out.value


@model(
    "w -> h",
    groups="h",
    diagonal=True,
    shape=(2, BATCH, INPUTS),
    tested={"d_rtrl": ("chunks of 3",)},
)
class VmappedPopulations(Cell):
    """Two populations that share a weight, written for one and mapped inside the step."""

    weights = {"w": W_IN, "w_out": W_OUT}

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(start((2, batch_size, H)))

    def update(self, x):
        def population(h, x):
            return 0.8 * h + jnp.tanh(braintrace.matmul(x, self.w.value))

        self.h.value = brainstate.transform.vmap(population)(self.h.value, x)
        return self.h.value.sum(0) @ self.w_out.value


@model("w_in -> h", groups="h", diagonal=True, tested={"d_rtrl": ("stream",)})
class Rematerialised(Cell):
    weights = {"w_in": W_IN, "w_out": W_OUT}
    states_of = {"h": (H,)}

    def update(self, x):
        @jax.checkpoint
        def drive(x, w):
            return jnp.tanh(braintrace.matmul(jax.nn.relu(x) + x, w))

        self.h.value = jnp.where(x.sum() > -100, 0.8, 0.2) * self.h.value + drive(
            x, self.w_in.value
        )
        return self.h.value @ self.w_out.value


# --- layouts --------------------------------------------------------------------------------


@model("w -> h", groups="h", diagonal=True, tested={"d_rtrl": ("chunks of 1",)})
class TransposedState(Cell):
    weights = {"w": W_IN, "w_out": W_OUT}

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(start((H, batch_size)))

    def update(self, x):
        self.h.value = 0.8 * self.h.value + jnp.tanh(braintrace.matmul(x, self.w.value).T)
        return self.h.value.T @ self.w_out.value


@model(
    "w -> grid, trace",
    groups="grid, trace",
    diagonal=True,
    canonical={"trace": (lambda v: v.T.reshape(BATCH, 2, 2), lambda v: v.reshape(BATCH, H).T)},
    tested={"es_d_rtrl": ("chunks of 6", "own gradient", "stream")},
)
class ReshapedStates(Cell):
    """A state with extra axes and a second one, transposed and flat, that filters it."""

    weights = {"w": W_IN, "w_out": W_OUT}

    def init_state(self, batch_size=None, **_):
        self.grid = brainstate.HiddenState(start((batch_size, 2, 2)))
        self.trace = brainstate.HiddenState(start((H, batch_size)))

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value).reshape(BATCH, 2, 2)
        slow = self.trace.value.T.reshape(BATCH, 2, 2)
        self.grid.value = 0.7 * self.grid.value + jnp.tanh(drive) - 0.2 * slow
        grid = self.grid.value.reshape(BATCH, H)
        self.trace.value = 0.9 * self.trace.value + 0.3 * jnp.sin(grid.T)
        return (grid + jnp.tanh(self.trace.value).T) @ self.w_out.value


@model("w -> h", groups="h", diagonal=True, tested={"d_rtrl": ("chunks of 6",)})
class PartlyDriven(Cell):
    """The weight drives half of the state, the other half drifts."""

    weights = {"w": (INPUTS, 2), "w_out": W_OUT}
    states_of = {"h": (H,)}

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value)
        h = 0.9 * self.h.value
        self.h.value = h.at[:, 1:3].add(drive)
        return self.h.value @ self.w_out.value


@model(
    "w -> h",
    groups="h",
    diagonal=True,
    tested={"d_rtrl": ("chunks of 6",)},
)
class SharedDrive(Cell):
    """One output of the operation drives a whole row of units."""

    weights = {"w": (INPUTS, 1), "w_out": W_OUT}
    states_of = {"h": (H,)}

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value)
        self.h.value = 0.8 * self.h.value + jnp.tanh(drive) * np.linspace(0.4, 1.0, H)
        return self.h.value @ self.w_out.value


@model("w -> e | i", groups=("e", "i"), diagonal=True)
class OneWeightTwoGroups(Cell):
    """The halves of one product drive two populations of different dynamics."""

    weights = {"w": (INPUTS, 2 * H), "w_out": W_OUT}
    states_of = {"e": (H,), "i": (H,)}

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value)
        self.e.value = 0.8 * self.e.value + drive[:, :H]
        self.i.value = 0.5 * self.i.value + jnp.tanh(drive[:, H:])
        return (self.e.value - self.i.value) @ self.w_out.value


# --- states at a part of the positions ------------------------------------------------------


def _at(places, size):
    """Between an array at some places of its last axis and one of all of them."""

    def spread(part):
        return jnp.zeros((*part.shape[:-1], size)).at[..., places].set(part)

    return spread, lambda whole: whole[..., places]


FIRST, REST = np.arange(H), np.arange(H, H + 2)


@model(
    "w -> e, i, syn",
    groups="e, i, syn",
    diagonal=True,
    canonical={"e": _at(FIRST, H + 2), "i": _at(REST, H + 2)},
    tested={"d_rtrl": ("own gradient",)},
)
class SynapsesOfTwoPopulations(Cell):
    """Slices of one vector of synapses feed two populations, one of which acts back on its own."""

    weights = {"w": (INPUTS, H + 2), "w_out": W_OUT}
    states_of = {"syn": (H + 2,), "e": (H,), "i": (2,)}

    def update(self, x):
        drive = braintrace.matmul(x, self.w.value)
        self.syn.value = 0.6 * self.syn.value + drive
        excited = jnp.tanh(self.syn.value[:, :H])
        self.e.value = 0.8 * self.e.value + excited
        self.i.value = 0.5 * self.i.value + self.syn.value[:, H:] - 0.1 * self.i.value**2
        self.syn.value = self.syn.value - 0.2 * jnp.pad(self.e.value, ((0, 0), (0, 2)))
        return (self.e.value + self.i.value.sum(-1, keepdims=True)) @ self.w_out.value


ODD_BACKWARD, MIDDLE = np.arange(H, -1, -2), np.arange(1, 4)


@model(
    "w -> late, syn, tail",
    groups="late, syn, tail",
    diagonal=True,
    canonical={"late": _at(ODD_BACKWARD, H + 1), "tail": _at(MIDDLE, H + 1)},
    tested={"d_rtrl": ("chunks of 3",)},
)
class StridedAndOverlappingSlices(Cell):
    """Every second synapse, backward, as it was before the step; and an overlapping part."""

    weights = {"w": (INPUTS, H + 1), "w_out": (3, OUTPUTS)}
    states_of = {"syn": (H + 1,), "late": (3,), "tail": (3,)}

    def update(self, x):
        self.late.value = 0.8 * self.late.value + jnp.tanh(self.syn.value[:, ::-2])
        self.tail.value = 0.7 * self.tail.value + self.syn.value[:, 1:4]
        self.syn.value = 0.6 * self.syn.value + braintrace.matmul(x, self.w.value)
        return (self.late.value - self.tail.value) @ self.w_out.value


@model(
    "w_a -> a, b, both",
    "w_b -> a, b, both",
    groups="a, b, both",
    diagonal=True,
    canonical={"a": _at(np.arange(2), 7), "both": _at(np.arange(1, 5), 7), "b": _at(MIDDLE + 3, 7)},
    tested={"d_rtrl": ("stream",), "snap": ("stream",)},
)
class NoStateAtAllPositions(Cell):
    """A population of the ends of two vectors of synapses, which have other ends as well."""

    weights = {"w_a": (INPUTS, 2), "w_b": (INPUTS, 3), "w_out": W_OUT}
    states_of = {"a": (2,), "b": (3,), "both": (H,)}

    def update(self, x):
        self.a.value = 0.6 * self.a.value + braintrace.matmul(x, self.w_a.value)
        self.b.value = 0.7 * self.b.value + braintrace.matmul(x, self.w_b.value)
        ends = [self.a.value[:, 1:], jnp.zeros((BATCH, 2)), self.b.value[:, :1]]
        self.both.value = 0.8 * self.both.value + jnp.tanh(jnp.concatenate(ends, -1))
        return self.both.value @ self.w_out.value + self.a.value[:, :1] * self.b.value[:, 1:]


# --- within a step --------------------------------------------------------------------------


@model(
    "gates -> c, h, slow",
    groups="c, h, slow",
    diagonal=True,
    tested={"ottt": ("chunks of 4",)},
)
class FilteredOutput(Cell):
    """The output of a cell, which no later step reads, is filtered by a third state."""

    weights = {"gates": (INPUTS, 2 * H), "w_out": W_OUT}
    states_of = {"c": (H,), "h": (H,), "slow": (H,)}

    def update(self, x):
        enter, out = jnp.split(braintrace.matmul(x, self.gates.value), 2, axis=-1)
        self.c.value = 0.8 * self.c.value + jnp.tanh(enter)
        self.h.value = jax.nn.sigmoid(out) * self.c.value**2
        self.slow.value = 0.6 * self.slow.value + jnp.sin(self.h.value)
        return (self.h.value + self.slow.value) @ self.w_out.value
