"""Rate cells of the zoo: vanilla, gated, normalised, stacked."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from marks import mixing
from zoo_record import INPUTS, OUTPUTS, Cell, H, zoo

import braintrace

sigmoid = jax.nn.sigmoid
W_IN, W_REC, W_BOTH, W_OUT = (INPUTS, H), (H, H), (INPUTS + H, H), (H, OUTPUTS)
MIXING = ("recurrent-mixing",)


def joined(*parts):
    return jnp.concatenate(parts, axis=-1)


@zoo(
    "w_in -> h",
    "w_rec -> h",
    groups="h",
    diagnostics=(*MIXING, "not-marked"),
    by_day={"d_rtrl": ("chunks of 6",)},
)
class Vanilla(Cell):
    weights = {"w_in": W_IN, "w_rec": W_REC, "bias": (H,), "w_out": W_OUT}
    states_of = {"h": (H,)}

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value)
        recurrent = braintrace.matmul(self.h.value, self.w_rec.value)
        self.h.value = jnp.tanh(drive + recurrent + self.bias.value)
        return self.h.value @ self.w_out.value


@zoo("w_in,bias -> h", "w_rec -> h", groups="h", diagnostics=MIXING, by_day={"d_rtrl": ("stream",)})
class Leaky(Cell):
    weights = {"w_in": W_IN, "w_rec": W_REC, "bias": (H,), "w_out": W_OUT}
    states_of = {"h": (H,)}
    gain = 1.5

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value, self.bias.value)
        recurrent = braintrace.matmul(self.h.value, self.w_rec.value)
        h = 0.8 * self.h.value + 0.2 * jnp.tanh(drive + recurrent)
        self.h.value = h
        return h @ self.w_out.value


@zoo(
    "w_in -> h",
    "u -> h",
    groups="h",
    diagonal=True,
    by_day={"d_rtrl": ("chunks of 4",), "ottt": ("stream",)},
)
class IndRNN(Cell):
    weights = {"w_in": W_IN, "u": (H,), "w_out": W_OUT}
    states_of = {"h": (H,)}

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value)
        self.h.value = jnp.tanh(drive + braintrace.element_wise(self.u.value) * self.h.value)
        return self.h.value @ self.w_out.value


@zoo(
    "w_z -> h",
    "w_h -> h",
    groups="h",
    diagnostics=("recurrent-mixing", "nested-weights"),
    by_day={
        "d_rtrl": ("chunks of 3",),
        "es_d_rtrl": ("chunks of 6",),
        "snap": ("chunks of 1",),
        "ottt": ("own gradient",),
    },
)
class GRUResetBefore(Cell):
    weights = {"w_z": W_BOTH, "w_r": W_BOTH, "w_h": W_BOTH, "w_out": W_OUT}
    states_of = {"h": (H,)}

    def update(self, x):
        h = self.h.value
        update = sigmoid(braintrace.matmul(joined(x, h), self.w_z.value))
        reset = sigmoid(braintrace.matmul(joined(x, h), self.w_r.value))
        candidate = jnp.tanh(braintrace.matmul(joined(x, reset * h), self.w_h.value))
        self.h.value = (1 - update) * h + update * candidate
        return self.h.value @ self.w_out.value


@zoo(
    "w_gates -> h",
    "w_in -> h",
    "w_rec,b_rec -> h",
    groups="h",
    diagnostics=MIXING,
    by_day={"d_rtrl": ("stream",), "snap": ("stream",)},
)
class GRUResetAfter(Cell):
    weights = {
        "w_gates": (INPUTS + H, 2 * H),
        "w_in": W_IN,
        "w_rec": W_REC,
        "b_rec": (H,),
        "w_out": W_OUT,
    }
    states_of = {"h": (H,)}

    def update(self, x):
        h = self.h.value
        gates = sigmoid(braintrace.matmul(joined(x, h), self.w_gates.value))
        reset, update = jnp.split(gates, 2, axis=-1)
        drive = braintrace.matmul(x, self.w_in.value)
        recurrent = braintrace.matmul(h, self.w_rec.value, self.b_rec.value)
        self.h.value = (1 - update) * h + update * jnp.tanh(drive + reset * recurrent)
        return self.h.value @ self.w_out.value


@zoo(
    "w -> c, h",
    groups="c, h",
    diagonal=True,
    by_day={"d_rtrl": ("chunks of 1", "own gradient", "stream")},
)
class ReadsAnOldState(Cell):
    """A state without memory of its own is made of the old value of another, and has no trace."""

    weights = {"w": W_IN, "w_out": W_OUT}
    states_of = {"c": (H,), "h": (H,)}

    def update(self, x):
        drive, c = braintrace.matmul(x, self.w.value), self.c.value
        self.c.value = 0.9 * c + drive
        self.h.value = jnp.tanh(0.7 * c + drive)
        return self.h.value @ self.w_out.value


@zoo("gates -> c, h", groups="c, h", diagnostics=MIXING, by_day={"d_rtrl": ("own gradient",)})
class LSTMFused(Cell):
    weights = {
        "gates": {"weight": (INPUTS + H, 4 * H), "bias": (4 * H,)},
        "w_out": W_OUT,
    }
    states_of = {"h": (H,), "c": (H,)}

    def update(self, x):
        weight, bias = self.gates.value["weight"], self.gates.value["bias"]
        y = braintrace.matmul(joined(x, self.h.value), weight, bias)
        i, f, g, o = jnp.split(y, 4, axis=-1)
        self.c.value = sigmoid(f + 1) * self.c.value + sigmoid(i) * jnp.tanh(g)
        self.h.value = sigmoid(o) * jnp.tanh(self.c.value)
        return self.h.value @ self.w_out.value


@zoo("gates -> c, h", groups="c, h", diagnostics=MIXING, by_day={"d_rtrl": ("chunks of 6",)})
class LSTMReshapedGates(LSTMFused):
    def update(self, x):
        weight, bias = self.gates.value["weight"], self.gates.value["bias"]
        y = braintrace.matmul(joined(x, self.h.value), weight, bias)
        gates = y.reshape(y.shape[0], H, 4)
        i, f, g, o = (gates[..., k] for k in range(4))
        self.c.value = sigmoid(f + 1) * self.c.value + sigmoid(i) * jnp.tanh(g)
        self.h.value = sigmoid(o) * jnp.tanh(self.c.value)
        return self.h.value @ self.w_out.value


@zoo(
    "w_i -> c, h",
    "w_f -> c, h",
    "w_g -> c, h",
    "w_o -> c, h",
    groups="c, h",
    diagnostics=MIXING,
    by_day={"d_rtrl": ("chunks of 6",)},
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
        c = f * self.c.value + i * g
        self.c.value = c
        self.h.value = o * jnp.tanh(c)
        return self.h.value @ self.w_out.value


@zoo(
    "gates -> c, h",
    "p_i -> c, h",
    "p_f -> c, h",
    "p_o -> c, h",
    groups="c, h",
    diagnostics=MIXING,
    by_day={
        "d_rtrl": ("chunks of 4",),
        "es_d_rtrl": ("own gradient",),
        "immediate": ("stream",),
    },
)
class LSTMPeephole(Cell):
    weights = {
        "gates": (INPUTS + H, 4 * H),
        "p_i": (H,),
        "p_f": (H,),
        "p_o": (H,),
        "w_out": W_OUT,
    }
    states_of = {"c": (H,), "h": (H,)}

    def update(self, x):
        c = self.c.value
        y = braintrace.matmul(joined(x, self.h.value), self.gates.value)
        i, f, g, o = jnp.split(y, 4, axis=-1)
        i = sigmoid(i + braintrace.element_wise(self.p_i.value) * c)
        f = sigmoid(f + braintrace.element_wise(self.p_f.value) * c)
        c = f * c + i * jnp.tanh(g)
        o = sigmoid(o + braintrace.element_wise(self.p_o.value) * c)
        self.c.value = c
        self.h.value = o * jnp.tanh(c)
        return self.h.value @ self.w_out.value


@zoo(
    "nu,theta -> im, re",
    "nu,theta -> im, re",
    "b_re -> im, re",
    "b_im -> im, re",
    groups="im, re",
    diagonal=True,
    by_day={
        "d_rtrl": ("chunks of 4", "own gradient", "stream"),
        "es_d_rtrl": ("chunks of 3",),
        "immediate": ("chunks of 3", "own gradient", "stream"),
    },
)
class LinearRecurrentUnit(Cell):
    weights = {
        "nu": (H,),
        "theta": (H,),
        "b_re": W_IN,
        "b_im": W_IN,
        "c_re": W_OUT,
        "c_im": W_OUT,
    }
    states_of = {"re": (H,), "im": (H,)}

    def update(self, x):
        poles = (self.nu.value, self.theta.value)
        cos = braintrace.element_wise(poles, lambda p: jnp.exp(-jnp.exp(p[0])) * jnp.cos(p[1]))
        sin = braintrace.element_wise(poles, lambda p: jnp.exp(-jnp.exp(p[0])) * jnp.sin(p[1]))
        re, im = self.re.value, self.im.value
        self.re.value = cos * re - sin * im + braintrace.matmul(x, self.b_re.value)
        self.im.value = sin * re + cos * im + braintrace.matmul(x, self.b_im.value)
        return self.re.value @ self.c_re.value - self.im.value @ self.c_im.value


@zoo(
    "w_in -> h",
    "w_rec -> h",
    groups="h",
    diagnostics=("recurrent-mixing", "mixed-positions"),
    by_day={"d_rtrl": ("chunks of 3",), "snap": ("own gradient",)},
)
class LayerNormRNN(Cell):
    weights = {"w_in": W_IN, "w_rec": W_REC, "w_out": W_OUT}
    states_of = {"h": (H,)}
    gain = 1.5

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value)
        current = drive + braintrace.matmul(self.h.value, self.w_rec.value)
        mean = mixing(current.mean(-1, keepdims=True))
        variance = mixing(((current - mean) ** 2).mean(-1, keepdims=True))
        normal = (current - mean) / jnp.sqrt(variance + 1e-5)
        self.h.value = 0.7 * self.h.value + 0.3 * jnp.tanh(normal)
        return self.h.value @ self.w_out.value


@zoo(
    "w_in -> h",
    groups="h",
    diagnostics=("plain-mixing", "not-marked"),
    by_day={"d_rtrl": ("stream",), "ottt": ("stream",)},
)
class PlainRecurrentRNN(Cell):
    weights = {"w_in": W_IN, "w_rec": W_REC, "w_out": W_OUT}
    states_of = {"h": (H,)}

    def update(self, x):
        recurrent = mixing(self.h.value @ self.w_rec.value)
        drive = braintrace.matmul(x, self.w_in.value)
        self.h.value = 0.5 * self.h.value + jnp.tanh(drive + recurrent)
        return self.h.value @ self.w_out.value


@zoo("B,A -> h", "w_in -> h", groups="h", diagnostics=MIXING, by_day={"d_rtrl": ("chunks of 1",)})
class LoraRNN(Cell):
    weights = {"w_in": W_IN, "B": (H, 2), "A": (2, H), "w_out": W_OUT}
    states_of = {"h": (H,)}

    def update(self, x):
        recurrent = braintrace.lora_matmul(self.h.value, self.B.value, self.A.value, alpha=0.5)
        drive = braintrace.matmul(x, self.w_in.value)
        self.h.value = 0.6 * self.h.value + jnp.tanh(drive + recurrent)
        return self.h.value @ self.w_out.value


class LeakyLayer(brainstate.nn.Module):
    """One layer of the deeper models."""

    def __init__(self, inputs, units, leak):
        super().__init__()
        self.leak = leak
        self.cell = type("Weights", (Cell,), {"weights": {"w": (inputs, units)}})()
        self.units = units

    def init_state(self, batch_size=None, **_):
        values = jnp.linspace(-0.3, 0.5, batch_size * self.units)
        self.h = brainstate.HiddenState(values.reshape(batch_size, self.units))

    def update(self, x):
        drive = braintrace.matmul(x, self.cell.w.value)
        self.h.value = self.leak * self.h.value + jnp.tanh(drive)
        return self.h.value


@zoo(
    "lower/cell/w -> lower/h",
    "middle/cell/w -> middle/h",
    "upper/cell/w -> upper/h",
    groups=("lower/h", "middle/h", "upper/h"),
    diagnostics=("layer-to-layer", "not-a-linear-readout"),
    by_day={"d_rtrl": ("own gradient",)},
)
class Stacked(Cell):
    weights = {"w_out": (3, OUTPUTS)}

    def __init__(self):
        super().__init__()
        self.lower = LeakyLayer(INPUTS, H, 0.8)
        self.middle = LeakyLayer(H, H, 0.6)
        self.upper = LeakyLayer(H, 3, 0.4)

    def update(self, x):
        return self.upper(self.middle(self.lower(x))) @ self.w_out.value


@zoo(
    "lower/cell/w -> lower/h",
    "upper/cell/w -> upper/h",
    groups=("lower/h", "upper/h"),
    diagnostics=("layer-to-layer", "not-a-linear-readout"),
    by_day={"d_rtrl": ("chunks of 6",), "es_d_rtrl": ("stream",), "immediate": ("own gradient",)},
)
class SkipConnected(Cell):
    weights = {"w_out": W_OUT}

    def __init__(self):
        super().__init__()
        self.lower = LeakyLayer(INPUTS, H, 0.8)
        self.upper = LeakyLayer(INPUTS + H, H, 0.5)

    def update(self, x):
        lower = self.lower(x)
        upper = self.upper(joined(x, lower))
        return (lower + upper) @ self.w_out.value


@zoo(
    "w_in -> lower",
    "w_rec -> lower",
    "w_up,feedback -> upper",
    groups=("lower", "upper"),
    diagnostics=("recurrent-mixing", "layer-to-layer", "not-a-linear-readout", "no-hidden-state"),
    by_day={"d_rtrl": ("stream",)},
)
class RandomFeedback(Cell):
    """Two layers whose products go back by matrices of their own, one of which learns."""

    weights = {"w_in": W_IN, "w_rec": W_REC, "w_up": (H, 3), "feedback": (H, 3), "w_out": (3, 2)}
    states_of = {"lower": (H,), "upper": (3,)}

    def __init__(self):
        super().__init__()
        fixed = np.random.default_rng(4).standard_normal((H, H)) / 2
        self.recurrent = brainstate.LongTermState(jnp.asarray(fixed, float))
        self.readout = brainstate.LongTermState(jnp.asarray(fixed[:3, :2], float))

    def update(self, x):
        product = braintrace.feedback_matmul
        drive = braintrace.matmul(x, self.w_in.value)
        recurrent = product(self.lower.value, self.w_rec.value, self.recurrent.value)
        self.lower.value = 0.7 * self.lower.value + jnp.tanh(drive + recurrent)
        up = product(self.lower.value, self.w_up.value, self.feedback.value)
        self.upper.value = 0.5 * self.upper.value + jnp.tanh(up)
        return product(self.upper.value, self.w_out.value, self.readout.value)
