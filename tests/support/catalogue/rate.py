"""Rate cells beyond `basic.py`: gates of other forms, stacks, heads, words."""

import brainstate
import jax.numpy as jnp
import numpy as np

import braintrace

from .basic import (
    IN_OUT,
    MIXING,
    W_IN,
    W_OUT,
    W_REC,
    LeakyLayer,
    LSTMFusedCell,
    Rate,
    joined,
    sigmoid,
)
from .model import INPUTS, OUTPUTS, Cell, H, model

HEADS, UNITS = 2, 3


@model("w -> c, h", groups="c, h", diagonal=True)
class ReadsAnOldState(Cell):
    """A state without memory of its own is made of the old value of another, and has no trace."""

    weights = {"w": W_IN, "w_out": W_OUT}
    states_of = {"c": (H,), "h": (H,)}

    def update(self, x):
        drive, c = braintrace.matmul(x, self.w.value), self.c.value
        self.c.value = 0.9 * c + drive
        self.h.value = jnp.tanh(0.7 * c + drive)
        return self.h.value @ self.w_out.value


@model("gates -> c, h", groups="c, h", diagnostics=MIXING)
class LSTMReshapedGates(LSTMFusedCell):
    def split(self, gates):
        gates = gates.reshape(*gates.shape[:-1], H, 4)
        return (gates[..., k] for k in range(4))


@model(
    "gates -> c, h",
    "p_i -> c, h",
    "p_f -> c, h",
    "p_o -> c, h",
    groups="c, h",
    diagnostics=MIXING,
    tested={
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


@model(
    "nu,theta -> im, re",
    "nu,theta -> im, re",
    "b_re -> im, re",
    "b_im -> im, re",
    groups="im, re",
    diagonal=True,
    tested={"immediate": ("chunks of 3", "own gradient", "stream")},
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


@model("B,A -> h", "w_in -> h", groups="h", diagnostics=MIXING)
class LoraRNN(Cell):
    weights = {"w_in": W_IN, "B": (H, 2), "A": (2, H), "w_out": W_OUT}
    states_of = {"h": (H,)}

    def update(self, x):
        recurrent = braintrace.lora_matmul(self.h.value, self.B.value, self.A.value, alpha=0.5)
        drive = braintrace.matmul(x, self.w_in.value)
        self.h.value = 0.6 * self.h.value + jnp.tanh(drive + recurrent)
        return self.h.value @ self.w_out.value


@model(
    "lower/w -> lower/h",
    "middle/w -> middle/h",
    "upper/w -> upper/h",
    groups=("lower/h", "middle/h", "upper/h"),
    diagnostics=("truncated",),
    tested={"d_rtrl": ("own gradient",)},
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


FEEDBACK = np.cos(np.arange(H * OUTPUTS)).reshape(W_OUT)


@model("w_in -> h", "w_rec -> h", groups="h", diagnostics=(*MIXING, "no-trace"))
class LeakyRNNWithFeedback(Rate):
    """Its gradients are not those of a loss: the error goes back by another matrix."""

    weights = {**IN_OUT, "w_rec": W_REC}

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value)
        recurrent = braintrace.matmul(self.h.value, self.w_rec.value)
        self.h.value = 0.75 * self.h.value + jnp.tanh(drive + recurrent) / 4
        weight = self.w_out.value
        return braintrace.feedback_matmul(self.h.value, weight, jnp.asarray(FEEDBACK, weight.dtype))


@model(
    "w_in -> lower",
    "w_rec -> lower",
    "w_up,feedback -> upper",
    groups=("lower", "upper"),
    diagnostics=("truncated", "truncated", "no-trace"),
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


@model(
    "w_in -> h",
    "w_rec -> h",
    "w_value -> o",
    "share -> o",
    "w_once -> s",
    "spread -> s",
    groups=("h", "o", "s"),
    diagnostics=("truncated",),
)
class Heads(Cell):
    """A matrix for every head; values are weighed, and others spread, without being mixed."""

    weights = {
        "w_in": (HEADS, INPUTS, UNITS),
        "w_rec": (HEADS, UNITS, UNITS),
        "w_value": (UNITS, HEADS, INPUTS),
        "share": (HEADS,),
        "w_once": (INPUTS, UNITS),
        "spread": (2,),
        "w_out": (HEADS * UNITS, OUTPUTS),
        "w_out_o": (UNITS, OUTPUTS),
        "w_out_s": (2 * UNITS, OUTPUTS),
    }
    states_of = {"h": (HEADS, UNITS), "o": (UNITS,), "s": (2, UNITS)}

    def update(self, x):
        drive = braintrace.einsum("bi,gik->bgk", x, self.w_in.value)
        recurrent = braintrace.grouped_matmul(self.h.value, self.w_rec.value)
        self.h.value = 0.7 * self.h.value + 0.3 * jnp.tanh(drive + recurrent)
        values = braintrace.einsum("bi,kgi->bgk", x, self.w_value.value)
        weighed = braintrace.einsum("bgk,g->bk", values, self.share.value)
        self.o.value = 0.8 * self.o.value + jnp.tanh(weighed)
        once = jnp.tanh(braintrace.matmul(x, self.w_once.value))
        spread = braintrace.einsum("bk,n->bnk", once, self.spread.value)
        self.s.value = 0.6 * self.s.value + spread
        heads, twice = self.h.value.reshape(len(x), -1), self.s.value.reshape(len(x), -1)
        out = heads @ self.w_out.value + self.o.value @ self.w_out_o.value
        return out + twice @ self.w_out_s.value


@model(
    "table -> h",
    "w_in -> h",
    "w_rec -> h",
    groups="h",
    diagnostics=("truncated", "no-trace, warning"),
)
class Words(Cell):
    """Rows of one table drive the units themselves, those of the other go through a matrix."""

    weights = {
        "table": (INPUTS, H),
        "behind": (INPUTS, INPUTS),
        "w_in": (INPUTS, H),
        "w_rec": (H, H),
        "w_out": (H, OUTPUTS),
    }
    states_of = {"h": (H,)}

    def update(self, x):
        word = jnp.argmax(x, axis=-1)
        drive = braintrace.embedding(word, self.table.value)
        drive += braintrace.matmul(braintrace.embedding(word, self.behind.value), self.w_in.value)
        drive += braintrace.matmul(self.h.value, self.w_rec.value)
        self.h.value = 0.7 * self.h.value + 0.3 * jnp.tanh(drive)
        return self.h.value @ self.w_out.value
