"""Models of the zoo whose products are none of two matrices: heads, and words."""

import jax.numpy as jnp
from zoo_record import INPUTS, OUTPUTS, Cell, H, zoo

import braintrace

HEADS, UNITS = 2, 3


@zoo(
    "w_in -> h",
    "w_rec -> h",
    "w_value -> o",
    "share -> o",
    "w_once -> s",
    "spread -> s",
    groups=("h", "o", "s"),
    diagnostics=("recurrent-mixing",),
    by_day={"d_rtrl": ("own gradient",)},
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


@zoo(
    "table -> h",
    "w_in -> h",
    "w_rec -> h",
    groups="h",
    diagnostics=("recurrent-mixing", "nested-weights"),
    by_day={"d_rtrl": ("chunks of 6",)},
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
