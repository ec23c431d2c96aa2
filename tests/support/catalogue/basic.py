"""Small models that most tests run over, written for a batch axis of any length, or none."""

import jax
import jax.numpy as jnp
from marks import mixing, spike, spike_reverse_only

import braintrace

from .model import BATCH, INPUTS, OUTPUTS, Cell, H, model

sigmoid = jax.nn.sigmoid
W_IN, W_REC, W_BOTH, W_OUT = (INPUTS, H), (H, H), (INPUTS + H, H), (H, OUTPUTS)
IN_OUT = {"w_in": W_IN, "w_out": W_OUT}
MIXING = ("truncated",)


def joined(*parts):
    return jnp.concatenate(parts, axis=-1)


class Rate(Cell):
    states_of = {"h": (H,)}


class Spiking(Cell):
    states_of = {"V": (H,)}
    gain = 2.5


# --- every state-to-state path is element by element ------------------------------------------


@model("w_in -> h", groups="h", diagonal=True)
class Leaky(Rate):
    weights = IN_OUT

    def update(self, x):
        self.h.value = 0.8 * self.h.value + braintrace.matmul(x, self.w_in.value)
        return self.h.value @ self.w_out.value


@model("layer -> h", groups="h", diagonal=True)
class LeakyWithBias(Rate):
    weights = {"layer": {"weight": W_IN, "bias": (H,)}, "w_out": W_OUT, "b_out": (OUTPUTS,)}

    def update(self, x):
        layer = self.layer.value
        y = braintrace.matmul(x, layer["weight"], layer["bias"])
        self.h.value = 0.8 * self.h.value + jnp.tanh(y)
        return self.h.value @ self.w_out.value + self.b_out.value


@model("w_in -> h", groups="h", diagonal=True)
class LeakyWithMaskedWeight(Rate):
    weights = IN_OUT

    def update(self, x):
        weight = self.w_in.value
        checkerboard = jnp.indices(weight.shape).sum(0) % 2 == 0
        masked = jnp.abs(weight) * checkerboard.astype(weight.dtype)
        self.h.value = 0.8 * self.h.value + braintrace.matmul(x, masked)
        return self.h.value @ self.w_out.value


@model("w_in -> h", groups="h", diagonal=True)
class LeakyWithBypass(Rate):
    weights = {**IN_OUT, "w_bypass": W_OUT}

    def update(self, x):
        y = braintrace.matmul(x, self.w_in.value)
        self.h.value = 0.8 * self.h.value + jnp.tanh(y)
        return self.h.value @ self.w_out.value + jnp.sin(y) @ self.w_bypass.value


@model("w -> h", "w -> k", groups=("h", "k"), diagonal=True, shape=(BATCH, INPUTS + H))
class TiedPair(Cell):
    """One weight drives a population, its transpose another one."""

    weights = {"w": W_IN, "w_out": W_OUT, "w_out_k": (INPUTS, OUTPUTS)}
    states_of = {"h": (H,), "k": (INPUTS,)}

    def update(self, x):
        forward = braintrace.matmul(x[..., :INPUTS], self.w.value)
        backward = braintrace.matmul(x[..., INPUTS:], self.w.value.T)
        self.h.value = 0.8 * self.h.value + jnp.tanh(forward)
        self.k.value = 0.6 * self.k.value + jnp.tanh(backward)
        return self.h.value @ self.w_out.value + self.k.value @ self.w_out_k.value


@model(
    "w_rec -> h",
    "w_in,b_in -> h",
    groups="h",
    diagonal=True,
    tested={"ottt": ("stream",)},
)
class IndRNN(Rate):
    weights = {**IN_OUT, "w_rec": (H,), "b_in": (H,)}

    def update(self, x):
        recurrent = braintrace.element_wise(self.w_rec.value)
        drive = braintrace.matmul(x, self.w_in.value, self.b_in.value)
        self.h.value = jnp.tanh(drive + recurrent * self.h.value)
        return self.h.value @ self.w_out.value


@model("leak -> h", "w_in -> h", groups="h", diagonal=True)
class LearntLeak(Rate):
    weights = {**IN_OUT, "leak": (H,)}

    def update(self, x):
        leak = braintrace.element_wise(self.leak.value, sigmoid)
        drive = braintrace.matmul(x, self.w_in.value)
        self.h.value = leak * self.h.value + (1 - leak) * jnp.tanh(drive)
        return self.h.value @ self.w_out.value


@model(
    "angle -> im, re",
    "angle -> im, re",
    "w_re -> im, re",
    "w_im -> im, re",
    groups="im, re",
    diagonal=True,
)
class Rotation(Cell):
    """A complex diagonal linear recurrence as two real states."""

    weights = {"w_re": W_IN, "w_im": W_IN, "angle": (H,), "w_out": W_OUT, "w_out_im": W_OUT}
    states_of = {"re": (H,), "im": (H,)}

    def update(self, x):
        re, im = self.re.value, self.im.value
        cos = 0.9 * braintrace.element_wise(self.angle.value, jnp.cos)
        sin = 0.9 * braintrace.element_wise(self.angle.value, jnp.sin)
        self.re.value = cos * re - sin * im + braintrace.matmul(x, self.w_re.value)
        self.im.value = sin * re + cos * im + braintrace.matmul(x, self.w_im.value)
        return self.re.value @ self.w_out.value + jnp.tanh(self.im.value) @ self.w_out_im.value


@model("w_in -> V", groups="V", diagonal=True, spiking=True)
class InputLIF(Spiking):
    weights = IN_OUT

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value)
        self.V.value = 0.8 * self.V.value + drive - spike(self.V.value - 1)
        return spike(self.V.value - 1) @ self.w_out.value


@model(
    "w_in -> V, a",
    groups="V, a",
    diagonal=True,
    spiking=True,
    tested={"d_rtrl": ("chunks of 3", "own gradient", "stream")},
)
class ALIF(Spiking):
    """LIF with an adaptive threshold; the adaptation reads the membrane of the same step."""

    weights = IN_OUT
    states_of = {"V": (H,), "a": (H,)}

    def update(self, x):
        fired = spike(self.V.value - 1 - 0.3 * self.a.value)
        V = 0.8 * self.V.value + braintrace.matmul(x, self.w_in.value) - fired
        a = 0.9 * self.a.value + fired + 0.1 * V
        self.V.value, self.a.value = V, a
        return spike_reverse_only(V - 1 - 0.3 * a) @ self.w_out.value


@model(
    "w_in -> V, a", groups="V, a", diagonal=True, spiking=True, tested={"d_rtrl": ("chunks of 4",)}
)
class ALIFLateThreshold(Spiking):
    """The output reads the threshold as it was before the step."""

    weights = IN_OUT
    states_of = {"V": (H,), "a": (H,)}

    def update(self, x):
        fired = spike(self.V.value - 1 - 0.3 * self.a.value)
        V = 0.8 * self.V.value + braintrace.matmul(x, self.w_in.value) - fired
        z = spike(V - 1 - 0.3 * self.a.value)
        self.V.value, self.a.value = V, 0.9 * self.a.value + z
        return z @ self.w_out.value


@model("w_in -> V, g", groups="V, g", diagonal=True, tested={"d_rtrl": ("own gradient",)})
class Synapse(Cell):
    """A linear conductance that drives a linear membrane in the same step."""

    weights = IN_OUT
    states_of = {"g": (H,), "V": (H,)}

    def update(self, x):
        self.g.value = 0.7 * self.g.value + braintrace.matmul(x, self.w_in.value)
        self.V.value = 0.9 * self.V.value + 0.5 * self.g.value
        return self.V.value @ self.w_out.value


@model("w_in -> V, g", groups="V, g", diagonal=True, tested={"d_rtrl": ("chunks of 3",)})
class SynapseReadOut(Cell):
    """Both states are read out, and the synapse drives the membrane's leak."""

    weights = {**IN_OUT, "w_out_g": W_OUT}
    states_of = {"g": (H,), "V": (H,)}

    def update(self, x):
        g = 0.7 * self.g.value + jnp.tanh(braintrace.matmul(x, self.w_in.value))
        V = 0.9 * self.V.value + 0.5 * g * (1.5 - self.V.value)
        self.g.value, self.V.value = g, V
        return V @ self.w_out.value + jnp.sin(g) @ self.w_out_g.value


# --- recurrent ----------------------------------------------------------------------------------


@model(
    "w_in,bias -> h",
    "w_rec -> h",
    groups="h",
    diagnostics=MIXING,
    tested={"d_rtrl": ("chunks of 6",)},
)
class TanhRNN(Rate):
    weights = {**IN_OUT, "w_rec": W_REC, "bias": (H,)}

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value, self.bias.value)
        recurrent = braintrace.matmul(self.h.value, self.w_rec.value)
        self.h.value = jnp.tanh(drive + recurrent)
        return self.h.value @ self.w_out.value


@model("w_in,bias -> h", "w_rec -> h", groups="h", diagnostics=MIXING)
class LeakyRNN(Rate):
    weights = {**IN_OUT, "w_rec": W_REC, "bias": (H,)}
    gain = 1.5

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value, self.bias.value)
        recurrent = braintrace.matmul(jnp.tanh(self.h.value), self.w_rec.value)
        self.h.value = 0.8 * self.h.value + 0.2 * (drive + recurrent)
        return jnp.tanh(self.h.value) @ self.w_out.value


@model(
    "w_rec -> h",
    groups="h",
    diagnostics=(*MIXING, "not-marked"),
    output=(BATCH, H),
    tested={"d_rtrl": ("chunks of 4",)},
)
class PlainInputRNN(Rate):
    """Marked recurrent weight, plain input weight (the model of the introduction)."""

    weights = {"w_rec": W_REC, "w_in": W_IN}

    def update(self, x):
        recurrent = braintrace.matmul(self.h.value, self.w_rec.value)
        self.h.value = jnp.tanh(x @ self.w_in.value + recurrent)
        return self.h.value


@model(
    "w_in -> h",
    groups="h",
    diagnostics=("truncated, warning", "not-marked, warning"),
    tested={"ottt": ("stream",)},
)
class PlainRecurrentRNN(Rate):
    """Marked input weight, plain recurrent weight: mixing that no trace can follow."""

    weights = {**IN_OUT, "w_rec": W_REC}
    gain = 1.5

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value)
        recurrent = mixing(self.h.value @ self.w_rec.value)
        self.h.value = 0.8 * self.h.value + 0.2 * jnp.tanh(drive + recurrent)
        return self.h.value @ self.w_out.value


@model("w_in -> h", groups="h", diagnostics=("not-marked",))
class PlainEncoder(Rate):
    """A plain layer before the marked weight, and a plain way into the state beside it."""

    weights = {**IN_OUT, "w_in": W_REC, "w_encode": W_IN, "w_skip": W_IN}

    def update(self, x):
        encoded = jnp.tanh(x @ self.w_encode.value)
        drive = braintrace.matmul(encoded, self.w_in.value) + x @ self.w_skip.value
        self.h.value = 0.8 * self.h.value + jnp.tanh(drive)
        return self.h.value @ self.w_out.value


@model(
    "w_z -> h",
    "w_h -> h",
    groups="h",
    diagnostics=(*MIXING, "no-trace, warning"),
    tested={"es_d_rtrl": ("chunks of 6",), "snap": ("chunks of 1",), "ottt": ("own gradient",)},
)
class GRU(Rate):
    """The reset gate acts before the recurrent product: it reaches h only through `w_h`."""

    weights = {"w_z": W_BOTH, "w_r": W_BOTH, "w_h": W_BOTH, "w_out": W_OUT}

    def update(self, x):
        h = self.h.value
        z = sigmoid(braintrace.matmul(joined(x, h), self.w_z.value))
        r = sigmoid(braintrace.matmul(joined(x, h), self.w_r.value))
        candidate = jnp.tanh(braintrace.matmul(joined(x, r * h), self.w_h.value))
        self.h.value = (1 - z) * h + z * candidate
        return self.h.value @ self.w_out.value


@model(
    "w_gates -> h",
    "w_rec,b_rec -> h",
    "w_in -> h",
    groups="h",
    diagnostics=MIXING,
    tested={"snap": ("stream",)},
)
class GRUResetAfter(Rate):
    weights = {**IN_OUT, "w_gates": (INPUTS + H, 2 * H), "w_rec": W_REC, "b_rec": (H,)}

    def update(self, x):
        h = self.h.value
        gates = sigmoid(braintrace.matmul(joined(x, h), self.w_gates.value))
        z, r = jnp.split(gates, 2, axis=-1)
        recurrent = braintrace.matmul(h, self.w_rec.value, self.b_rec.value)
        candidate = jnp.tanh(braintrace.matmul(x, self.w_in.value) + r * recurrent)
        self.h.value = (1 - z) * h + z * candidate
        return self.h.value @ self.w_out.value


class LSTMFusedCell(Cell):
    weights = {"gates": {"weight": (INPUTS + H, 4 * H), "bias": (4 * H,)}, "w_out": W_OUT}
    states_of = {"c": (H,), "h": (H,)}

    def update(self, x):
        weight, bias = self.gates.value["weight"], self.gates.value["bias"]
        i, f, g, o = self.split(braintrace.matmul(joined(x, self.h.value), weight, bias))
        self.c.value = sigmoid(f) * self.c.value + sigmoid(i) * jnp.tanh(g)
        self.h.value = sigmoid(o) * jnp.tanh(self.c.value)
        return self.h.value @ self.w_out.value

    def split(self, gates):
        return jnp.split(gates, 4, axis=-1)


@model("gates -> c, h", groups="c, h", diagnostics=MIXING)
class LSTMFused(LSTMFusedCell):
    pass


@model(
    "w_i -> c, h", "w_f -> c, h", "w_g -> c, h", "w_o -> c, h", groups="c, h", diagnostics=MIXING
)
class LSTMSeparate(Cell):
    weights = {**dict.fromkeys(("w_i", "w_f", "w_g", "w_o"), W_BOTH), "w_out": W_OUT}
    states_of = {"c": (H,), "h": (H,)}

    def update(self, x):
        both = joined(x, self.h.value)
        i = sigmoid(braintrace.matmul(both, self.w_i.value))
        f = sigmoid(braintrace.matmul(both, self.w_f.value))
        g = jnp.tanh(braintrace.matmul(both, self.w_g.value))
        o = sigmoid(braintrace.matmul(both, self.w_o.value))
        self.c.value = f * self.c.value + i * g
        self.h.value = o * jnp.tanh(self.c.value)
        return self.h.value @ self.w_out.value


@model("w_in -> c, h", "w_rec -> c, h", groups="c, h", diagnostics=MIXING)
class ReadByAProductAlone(Cell):
    """A state that is computed from another, and that only the recurrent weight reads."""

    weights = {**IN_OUT, "w_rec": W_REC}
    states_of = {"c": (H,), "h": (H,)}

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value)
        drive = drive + braintrace.matmul(self.h.value, self.w_rec.value)
        self.c.value = 0.8 * self.c.value + drive
        self.h.value = jnp.tanh(self.c.value)
        return self.h.value @ self.w_out.value


@model("w_in -> V", "w_rec -> V", groups="V", diagnostics=MIXING, spiking=True)
class RecurrentLIF(Spiking):
    weights = {**IN_OUT, "w_rec": W_REC}

    def update(self, x):
        fired = spike(self.V.value - 1)
        drive = braintrace.matmul(x, self.w_in.value) + braintrace.matmul(fired, self.w_rec.value)
        self.V.value = 0.8 * self.V.value + drive - fired
        return spike(self.V.value - 1) @ self.w_out.value


@model(
    "w_in -> h",
    "w_rec -> h",
    groups="h",
    diagnostics=(*MIXING, "truncated, warning"),
    tested={"snap": ("own gradient",)},
)
class LayerNormRNN(Rate):
    """An element of y reaches its own unit directly, and every one through mean and scale."""

    weights = {**IN_OUT, "w_rec": W_REC}

    def update(self, x):
        y = braintrace.matmul(x, self.w_in.value) + braintrace.matmul(
            self.h.value, self.w_rec.value
        )
        mean = mixing(jnp.mean(y, axis=-1, keepdims=True))
        variance = mixing(jnp.mean((y - mean) ** 2, axis=-1, keepdims=True))
        self.h.value = 0.8 * self.h.value + jnp.tanh((y - mean) / jnp.sqrt(variance + 0.1))
        return self.h.value @ self.w_out.value


# --- of several layers --------------------------------------------------------------------------


class LeakyLayer(Rate):
    def __init__(self, inputs, units, leak):
        self.weights, self.states_of = {"w": (inputs, units)}, {"h": (units,)}
        super().__init__()
        self.leak = leak

    def update(self, x):
        self.h.value = self.leak * self.h.value + jnp.tanh(braintrace.matmul(x, self.w.value))
        return self.h.value


@model(
    "lower/w -> lower/h",
    "upper/w -> upper/h",
    groups=("lower/h", "upper/h"),
    diagnostics=("truncated",),
    tested={"immediate": ("own gradient",)},
)
class TwoLayers(Cell):
    """The upper layer, of another size, reads the lower one in the same step."""

    weights = {"w_out": (5, OUTPUTS), "w_out_lower": W_OUT}

    def __init__(self):
        super().__init__()
        self.lower, self.upper = LeakyLayer(INPUTS, H, 0.8), LeakyLayer(H, 5, 0.6)

    def update(self, x):
        lower = self.lower(x)
        return self.upper(lower) @ self.w_out.value + lower @ self.w_out_lower.value


@model(
    "w_in -> lower",
    "factor -> upper",
    groups=("lower", "upper"),
    diagnostics=("truncated, warning", "not-marked, warning", "truncated"),
)
class TwoLayersPlainLink(Cell):
    """A plain weight links the layers: what the upper one remembers of the lower has no trace."""

    weights = {"w_in": W_IN, "w_link": (H, 5), "factor": (5,), "w_out": (5, OUTPUTS)}
    states_of = {"lower": (H,), "upper": (5,)}

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value)
        self.lower.value = 0.8 * self.lower.value + jnp.tanh(drive)
        link = mixing(self.lower.value @ self.w_link.value)
        factor = braintrace.element_wise(self.factor.value)
        self.upper.value = 0.6 * self.upper.value + jnp.tanh(factor * link)
        return self.upper.value @ self.w_out.value
