"""Rate networks of the catalogue: cells, gates, stacks and heads."""

import jax
import jax.numpy as jnp
import numpy as np
from catalogue_models import INPUTS, OUTPUTS, Cell, H, model

import braintrace

sigmoid = jax.nn.sigmoid
W_IN, W_REC, W_BOTH, W_OUT = (INPUTS, H), (H, H), (INPUTS + H, H), (H, OUTPUTS)
IN_OUT = {"w_in": W_IN, "w_out": W_OUT}
HEADS, UNITS = 2, 3
FEEDBACK = np.cos(np.arange(H * OUTPUTS)).reshape(W_OUT)


def joined(*parts):
    return jnp.concatenate(parts, axis=-1)


@model(is_exact=True)
class Leaky(Cell):
    weights = IN_OUT

    def update(self, x):
        self.h.value = 0.8 * self.h.value + braintrace.matmul(x, self.w_in.value)
        return self.h.value @ self.w_out.value


@model(is_exact=True)
class IndRNN(Cell):
    weights = {**IN_OUT, "w_rec": (H,), "b_in": (H,)}

    def update(self, x):
        recurrent = braintrace.element_wise(self.w_rec.value)
        drive = braintrace.matmul(x, self.w_in.value, self.b_in.value)
        self.h.value = jnp.tanh(drive + recurrent * self.h.value)
        return self.h.value @ self.w_out.value


@model(is_exact=True)
class LearntLeak(Cell):
    weights = {**IN_OUT, "leak": (H,)}

    def update(self, x):
        leak = braintrace.element_wise(self.leak.value, sigmoid)
        drive = braintrace.matmul(x, self.w_in.value)
        self.h.value = leak * self.h.value + (1 - leak) * jnp.tanh(drive)
        return self.h.value @ self.w_out.value


@model(is_exact=True)
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


@model()
class TanhRNN(Cell):
    weights = {**IN_OUT, "w_rec": W_REC, "bias": (H,)}

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value, self.bias.value)
        recurrent = braintrace.matmul(self.h.value, self.w_rec.value)
        self.h.value = jnp.tanh(drive + recurrent)
        return self.h.value @ self.w_out.value


@model()
class LeakyRNN(Cell):
    weights = {**IN_OUT, "w_rec": W_REC, "bias": (H,)}
    gain = 1.5

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value, self.bias.value)
        recurrent = braintrace.matmul(jnp.tanh(self.h.value), self.w_rec.value)
        self.h.value = 0.8 * self.h.value + 0.2 * (drive + recurrent)
        return jnp.tanh(self.h.value) @ self.w_out.value


@model()
class PlainInputRNN(Cell):
    """Marked recurrent weight, plain input weight (the model of the introduction)."""

    weights = {"w_rec": W_REC, "w_in": W_IN}

    def update(self, x):
        recurrent = braintrace.matmul(self.h.value, self.w_rec.value)
        self.h.value = jnp.tanh(x @ self.w_in.value + recurrent)
        return self.h.value


@model()
class PlainRecurrentRNN(Cell):
    """Marked input weight, plain recurrent weight: mixing that no trace can follow."""

    weights = {**IN_OUT, "w_rec": W_REC}
    gain = 1.5

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value)
        recurrent = self.h.value @ self.w_rec.value
        self.h.value = 0.8 * self.h.value + 0.2 * jnp.tanh(drive + recurrent)
        return self.h.value @ self.w_out.value


@model()
class GRU(Cell):
    """The reset gate acts before the recurrent product: it reaches h only through `w_h`."""

    weights = {"w_z": W_BOTH, "w_r": W_BOTH, "w_h": W_BOTH, "w_out": W_OUT}

    def update(self, x):
        h = self.h.value
        z = sigmoid(braintrace.matmul(joined(x, h), self.w_z.value))
        r = sigmoid(braintrace.matmul(joined(x, h), self.w_r.value))
        candidate = jnp.tanh(braintrace.matmul(joined(x, r * h), self.w_h.value))
        self.h.value = (1 - z) * h + z * candidate
        return self.h.value @ self.w_out.value


@model()
class GRUResetAfter(Cell):
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


@model()
class LSTMFused(LSTMFusedCell):
    pass


@model()
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


@model()
class LayerNormRNN(Cell):
    """An element of y reaches its own unit directly, and every one through mean and scale."""

    weights = {**IN_OUT, "w_rec": W_REC}

    def update(self, x):
        y = braintrace.matmul(x, self.w_in.value) + braintrace.matmul(
            self.h.value, self.w_rec.value
        )
        mean = jnp.mean(y, axis=-1, keepdims=True)
        variance = jnp.mean((y - mean) ** 2, axis=-1, keepdims=True)
        self.h.value = 0.8 * self.h.value + jnp.tanh((y - mean) / jnp.sqrt(variance + 0.1))
        return self.h.value @ self.w_out.value


@model()
class LoraRNN(Cell):
    weights = {"w_in": W_IN, "B": (H, 2), "A": (2, H), "w_out": W_OUT}
    states_of = {"h": (H,)}

    def update(self, x):
        recurrent = braintrace.lora_matmul(self.h.value, self.B.value, self.A.value, alpha=0.5)
        drive = braintrace.matmul(x, self.w_in.value)
        self.h.value = 0.6 * self.h.value + jnp.tanh(drive + recurrent)
        return self.h.value @ self.w_out.value


@model()
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


@model()
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


@model()
class LeakyRNNWithFeedback(Cell):
    """Its gradients are not those of a loss: the error goes back by another matrix."""

    weights = {**IN_OUT, "w_rec": W_REC}

    def update(self, x):
        drive = braintrace.matmul(x, self.w_in.value)
        recurrent = braintrace.matmul(self.h.value, self.w_rec.value)
        self.h.value = 0.75 * self.h.value + jnp.tanh(drive + recurrent) / 4
        weight = self.w_out.value
        return braintrace.feedback_matmul(self.h.value, weight, jnp.asarray(FEEDBACK, weight.dtype))


@model(is_exact=True)
class FastWeights(Cell):
    """Linear attention: a matrix of keys and values that decays."""

    weights = {"w_k": W_IN, "w_v": (INPUTS, 3), "w_out": W_OUT}
    states_of = {"S": (H, 3)}

    def update(self, x):
        key = jnp.tanh(braintrace.matmul(x, self.w_k.value))
        value = braintrace.matmul(x, self.w_v.value)
        self.S.value = 0.9 * self.S.value + jnp.einsum("bh,bk->bhk", key, value)
        return jnp.einsum("bhk,bk->bh", self.S.value, x) @ self.w_out.value


class LeakyLayer(Cell):
    def __init__(self, inputs, units, leak):
        self.weights, self.states_of = {"w": (inputs, units)}, {"h": (units,)}
        super().__init__()
        self.leak = leak

    def update(self, x):
        self.h.value = self.leak * self.h.value + jnp.tanh(braintrace.matmul(x, self.w.value))
        return self.h.value


@model()
class TwoLayers(Cell):
    """The upper layer, of another size, reads the lower one in the same step."""

    weights = {"w_out": (5, OUTPUTS), "w_out_lower": W_OUT}

    def __init__(self):
        super().__init__()
        self.lower, self.upper = LeakyLayer(INPUTS, H, 0.8), LeakyLayer(H, 5, 0.6)

    def update(self, x):
        lower = self.lower(x)
        return self.upper(lower) @ self.w_out.value + lower @ self.w_out_lower.value


@model()
class Stacked(Cell):
    weights = {"w_out": (3, OUTPUTS)}

    def __init__(self):
        super().__init__()
        self.lower = LeakyLayer(INPUTS, H, 0.8)
        self.middle = LeakyLayer(H, H, 0.6)
        self.upper = LeakyLayer(H, 3, 0.4)

    def update(self, x):
        return self.upper(self.middle(self.lower(x))) @ self.w_out.value
