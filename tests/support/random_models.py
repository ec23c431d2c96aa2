"""Random recurrent models: each in the library's operations, in plain JAX, and taken apart.

A model is a stack of layers with a readout. All sizes are fixed and small, so that a search is one
over structures. The frozen dataclasses print as the program that makes them again.
"""

import dataclasses

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u
from oracle import Plain, stop

import braintrace

BATCH, INPUTS, UNITS, OUTPUTS, STEPS = 2, 3, 4, 2, 6
SCALE = 0.7
"""Of low-rank products."""


class Marked:
    """The operations of the library."""

    matmul = staticmethod(braintrace.matmul)
    element_wise = staticmethod(braintrace.element_wise)
    einsum = staticmethod(braintrace.einsum)
    grouped = staticmethod(braintrace.grouped_matmul)
    embedding = staticmethod(braintrace.embedding)

    def lora(self, x, B, A, alpha):
        return braintrace.lora_matmul(x, B, A, alpha=alpha)

    def conv(self, x, kernel):
        options = {"padding": "VALID", "dimension_numbers": ("NWC", "WIO", "NWC")}
        y = braintrace.conv(jnp.atleast_2d(x)[..., None], kernel, **options)
        return y if x.ndim > 1 else y[0]

    def sparse(self, x, data, rows, columns, shape):
        starts = np.searchsorted(rows, np.arange(shape[0] + 1)).astype(np.int32)
        with jax.ensure_compile_time_eval():  # the oldest saiunit makes arrays of the indices
            data_at = (np.ones(len(rows)), columns.astype(np.int32), starts)
            matrix = u.sparse.CSR(data_at, shape=shape)
        return braintrace.sparse_matmul(x, data, sparse_mat=matrix)


class WithUnits(Marked):
    """The same: currents come in, resistances learn, and voltages come out."""

    def matmul(self, x, w, b=None):
        return super().matmul(x * u.mA, w * u.ohm, None if b is None else b * u.mV) / u.mV

    def element_wise(self, w, fn):
        return super().element_wise(w * u.ohm, lambda w: fn(w / u.ohm))


class Unmarked(Plain):
    """Operations of JAX alone, which the compiler has to mark."""

    def embedding(self, index, table):
        return table[index]

    def conv(self, x, kernel):
        layout = ("NWC", "WIO", "NWC")
        y = jax.lax.conv_general_dilated(
            jnp.atleast_2d(x)[..., None], kernel, (1,), "VALID", dimension_numbers=layout
        )
        return y if x.ndim > 1 else y[0]


@jax.custom_vjp
def spike(v):
    return (v > 0).astype(v.dtype)


spike.defvjp(lambda v: (spike(v), v), lambda v, g: (g / (1 + 2 * jnp.abs(v)) ** 2,))


def small_steps(h, target):
    """Three steps towards a target, in a loop."""
    return jax.lax.scan(lambda h, _: (h + 0.2 * (target - jnp.sin(h)), None), h, None, length=3)[0]


ACTIVATIONS = {
    "tanh": jnp.tanh,
    "softplus": lambda y: jax.nn.softplus(y) - 0.5,
    "sine": jnp.sin,
    "spike": spike,
}
GATES = {"lstm": 4, "gru": 3}
STATES = {"lstm": ("c", "h"), "adapting": ("v", "a"), "synapse": ("s", "v")}
CELLS = ("plain", "leak", "adapting", "synapse", "gru", "lstm", "loop", "branches")
DRIVES = (
    *("joined", "bias", "low rank", "heads", "function", "grouped", "conv"),
    *("sparse", "embedding", "doubled", "shared"),
)
RECURRENT = ("none", "matmul", "masked", "sparse", "gain", "shared gain")
READOUTS = ("plain", "leaky", "late", "bypass")
FORMS = ("module", "function", "joined states")


@dataclasses.dataclass(frozen=True)
class Layer:
    """How the input enters, how the old output does, and what keeps the past."""

    drive: str = "function"
    recurrent: str = "none"
    cell: str = "plain"
    activation: str = "tanh"

    @property
    def outs(self):
        return GATES.get(self.cell, 1) * UNITS

    @property
    def mixes(self):
        """Whether units reach each other over time."""
        return self.recurrent in ("matmul", "masked", "sparse") or self.drive == "shared"

    def shapes(self, inputs):
        """Shapes of the parameters by name."""
        outs = self.outs
        found = {
            "joined": {"w": (inputs + UNITS * self.mixes, outs)},
            "bias": {"w": (inputs, outs), "b": (outs,)},
            "low rank": {"B": (inputs, 2), "A": (2, outs)},
            "heads": {"w": (inputs, outs // 2, 2)},
            "grouped": {"w": (2, inputs - 1, outs // 2)},
            "conv": {"w": (inputs - 1, 1, outs // 2)},
            "sparse": {"w": (len(self.places(inputs)[0]),)},
            "embedding": {"w": (3, outs)},
            "doubled": {"w": (inputs, outs // 2)},
            "shared": {"w": (UNITS, outs)},
        }.get(self.drive, {"w": (inputs, outs)})
        if self.mixes and self.drive not in ("joined", "shared"):
            places = np.nonzero(CONNECTED[:, :outs])[0]
            found["r"] = (len(places),) if self.recurrent == "sparse" else (UNITS, outs)
        if self.recurrent in ("gain", "shared gain"):
            found["g"] = (UNITS,) if self.recurrent == "gain" else (1,)
        if self.cell in ("leak", "adapting"):
            found["d"] = (UNITS,)
        return found

    def places(self, inputs):
        """Rows and columns of the entries of a sparse matrix."""
        return np.nonzero(np.add.outer(np.arange(inputs), np.arange(self.outs)) % 3 > 0)

    @property
    def states(self):
        return STATES.get(self.cell, ("h",))

    def output(self, h):
        if self.cell in ("adapting", "synapse"):
            return ACTIVATIONS[self.activation](h["v"])
        return h["h"]

    def drive_by(self, ops, p, x):
        """What the input gives."""
        inputs = x.shape[-1]
        if self.drive == "bias":
            return ops.matmul(x, p["w"], p["b"])
        if self.drive == "low rank":
            return ops.lora(x, p["B"], p["A"], SCALE)
        if self.drive == "heads":
            return flat(ops.einsum("...i,ioh->...oh", x, p["w"]))
        if self.drive == "grouped":
            return flat(ops.grouped(jnp.stack([x[..., 1:], x[..., :-1]], -2), p["w"]))
        if self.drive == "conv":
            return flat(ops.conv(x, p["w"]))
        if self.drive == "sparse":
            return ops.sparse(x, p["w"], *self.places(inputs), (inputs, self.outs))
        if self.drive == "embedding":
            return ops.embedding(jnp.digitize(x[..., 0], np.array([-0.4, 0.4])), p["w"])
        if self.drive == "doubled":  # an output drives two units
            return jnp.repeat(ops.matmul(x, p["w"]), 2, axis=-1)
        if self.drive == "function":
            return ops.matmul(x, jnp.abs(p["w"]) - 0.3)
        return ops.matmul(x, p["w"][:inputs])  # shared

    def drive_of(self, ops, p, h, x, mixing):
        """What input and old output give together. mixing: what passes from unit to unit."""
        old = self.output(h)
        source = old if mixing in ("full", "kept") else stop(old)
        recurrent = None
        if self.drive == "joined":
            recurrent = p["w"][x.shape[-1] :] if self.mixes else None
            y = ops.matmul(jnp.concatenate([x, source], -1) if self.mixes else x, p["w"])
        else:
            y = self.drive_by(ops, p, x)
            if self.mixes:
                recurrent = p["w"] if self.drive == "shared" else p["r"]
                mask = CONNECTED[:, : self.outs]
                if self.recurrent == "sparse" and "r" in p:
                    y = y + ops.sparse(source, recurrent, *np.nonzero(mask), mask.shape)
                    recurrent = jnp.zeros(mask.shape, y.dtype).at[np.nonzero(mask)].set(recurrent)
                else:
                    recurrent = recurrent * mask if self.recurrent == "masked" else recurrent
                    y = y + ops.matmul(source, recurrent)
        if "g" in p:
            y = y + tiled(ops.element_wise(p["g"], jnp.tanh) * old, self.outs)
        return y

    def step(self, ops, p, h, x, mixing="full"):
        """New states."""
        y, act = self.drive_of(ops, p, h, x, mixing), ACTIVATIONS[self.activation]
        decay = ops.element_wise(p["d"], jax.nn.sigmoid) if "d" in p else None
        if self.cell == "plain":
            return {"h": 0.7 * h["h"] + 0.5 * act(y)}
        if self.cell == "leak":
            return {"h": decay * h["h"] + (1 - decay) * act(y)}
        if self.cell == "adapting":
            v = 0.8 * h["v"] - 0.3 * h["a"] + y
            return {"v": v, "a": decay * h["a"] + 0.2 * act(v)}
        if self.cell == "synapse":  # which reaches the potential in the same step
            s = 0.8 * h["s"] + y
            return {"s": s, "v": 0.9 * h["v"] + 0.3 * s * (1 - h["v"])}
        if self.cell == "loop":
            return {"h": small_steps(h["h"], act(y))}
        if self.cell == "branches":
            return {"h": jnp.where(h["h"] > 0.1, 0.5 * h["h"] + act(y), 0.9 * h["h"] + 0.4 * y)}
        if self.cell == "gru":
            z, r, n = jnp.split(y, 3, -1)
            z = jax.nn.sigmoid(z)
            return {"h": (1 - z) * h["h"] + z * jnp.tanh(jax.nn.sigmoid(r) * n)}
        i, f, g, o = jnp.split(y, 4, -1)
        c = jax.nn.sigmoid(f) * h["c"] + jax.nn.sigmoid(i) * jnp.tanh(g)
        return {"c": c, "h": jax.nn.sigmoid(o) * jnp.tanh(c)}


CONNECTED = np.tile(np.add.outer(np.arange(UNITS), 2 * np.arange(UNITS)) % 3 > 0, (1, 4)) * 1.0


def flat(y):
    return y.reshape(*y.shape[:-2], -1)


def tiled(value, outs):
    return jnp.concatenate([value] * (outs // UNITS), -1)


@dataclasses.dataclass(frozen=True)
class RandomModel:
    """A stack of layers, each driven by the output of the one before."""

    layers: tuple[Layer, ...]
    readout: str = "plain"

    def params(self, dtype=np.float64):
        rng, found, inputs = np.random.default_rng(3), {}, INPUTS
        for i, layer in enumerate(self.layers):
            for name, shape in layer.shapes(inputs).items():
                scale = np.sqrt(max(1, shape[0] if len(shape) > 1 else 1))
                found[f"{name}{i}"] = rng.normal(size=shape) / scale
            inputs = UNITS
        found["out"] = rng.normal(size=(UNITS, OUTPUTS)) / 2
        return {name: jnp.asarray(value, dtype) for name, value in found.items()}

    def start(self, *batch, dtype=np.float64):
        found = {
            f"{s}{i}": np.linspace(-0.3, 0.4 + 0.1 * i, UNITS)
            for i, layer in enumerate(self.layers)
            for s in layer.states
        }
        if self.readout == "leaky":
            found["o"] = np.array([0.1, -0.2])
        return {
            k: jnp.asarray(np.broadcast_to(v, (*batch, *v.shape)), dtype) for k, v in found.items()
        }

    def own(self, i, tree):
        """The part of parameters or states that belongs to a layer."""
        return {k[:-1]: v for k, v in tree.items() if k[-1] == str(i)}

    def step(self, ops, p, h, x):
        """New states and output, as a user writes it."""
        new, first = {}, x
        for i, layer in enumerate(self.layers):
            own = layer.step(ops, self.own(i, p), self.own(i, h), x)
            new |= {f"{k}{i}": v for k, v in own.items()}
            x = layer.output(own)
        y = x @ p["out"]
        if self.readout == "leaky":
            y = new["o"] = 0.8 * h["o"] + y
        return new, y + self.beside(ops, p, h, first)

    def beside(self, ops, p, h, x):
        """What reaches the output past the new states."""
        if self.readout == "late":
            last = len(self.layers) - 1
            return 0.3 * self.layers[-1].output(self.own(last, h)) @ p["out"]
        if self.readout == "bypass":
            return 0.5 * self.layers[0].drive_by(ops, self.own(0, p), x)[..., :OUTPUTS]
        return 0.0

    def by_layer(self, ops, p, h, x, mixing, seen=lambda name, value: value):
        """The step of rules that take layers apart: the states as they are carried, and the output.

        Carried is what passes in a layer, its input held constant. What the rest of the step reads
        passes also by the input, parameters and old states held constant. `seen` may change it.
        """
        new, first = {}, x
        for i, layer in enumerate(self.layers):
            p_i, h_i = self.own(i, p), self.own(i, h)
            carried = layer.step(ops, p_i, h_i, stop(x), mixing)
            within = layer.step(Plain(), stop(p_i), stop(h_i), x, mixing)
            new |= {f"{k}{i}": v for k, v in carried.items()}
            read = {k: seen(f"{k}{i}", v) + within[k] - stop(within[k]) for k, v in carried.items()}
            x = layer.output(read)
        if self.readout == "leaky":  # a linear filter of what the last layer carries
            o = 0.8 * h["o"] + layer.output(carried) @ p["out"]
            y = o + (x - layer.output(carried)) @ stop(p["out"])
            return {**new, "o": o}, y
        return new, x @ p["out"] + self.beside(ops, p, h, first)


# --- as models of the library ---------------------------------------------------------------------


class Module(brainstate.nn.Module):
    """A brainstate module; `joined` keeps the states of a layer in one `HiddenGroupState`."""

    def __init__(self, model, ops, dtype, joined=False):
        super().__init__()
        self.random_model, self.ops, self.dtype, self.joined = model, ops, dtype, joined
        params = model.params(dtype)
        self.names = [*params]
        for name, value in params.items():
            setattr(self, name, brainstate.ParamState(value))

    def init_state(self, batch_size=None, **_):
        batch = () if batch_size is None else (batch_size,)
        start = self.random_model.start(*batch, dtype=self.dtype)
        for name, members in self.members().items():
            if self.joined and len(members) > 1:
                value = jnp.stack([start[m] for m in members], -1)
                state = brainstate.HiddenGroupState(value)
            else:
                state = brainstate.HiddenState(start[members[0]])
            setattr(self, name, state)

    def members(self):
        """{attribute: names of its states}."""
        if not self.joined:
            return {name: (name,) for name in self.random_model.start(1, dtype=self.dtype)}
        layers = enumerate(self.random_model.layers)
        found = {f"state{i}": tuple(f"{s}{i}" for s in layer.states) for i, layer in layers}
        return found | ({"o": ("o",)} if self.random_model.readout == "leaky" else {})

    def update(self, x):
        p = {name: getattr(self, name).value for name in self.names}
        h = {}
        for name, members in self.members().items():
            value = getattr(self, name).value
            parts = [value] if len(members) == 1 else [value[..., k] for k in range(len(members))]
            h |= dict(zip(members, parts, strict=True))
        new, y = self.random_model.step(self.ops, p, h, x)
        for name, members in self.members().items():
            values = [new[m] for m in members]
            getattr(self, name).value = values[0] if len(values) == 1 else jnp.stack(values, -1)
        return y


OPERATIONS = {"marked": Marked, "units": WithUnits, "auto": Unmarked}


def model_of(model, form="module", marks="marked", dtype=np.float64, vmap=False):
    """A random model for `braintrace.compile`."""
    ops = OPERATIONS[marks]
    if form == "function":

        def step(params, state, x):
            return model.step(ops(), params, state, x)

        def state(batch):
            return model.start(batch, dtype=dtype)

        alone = model.start(dtype=dtype)
        return braintrace.from_function(step, model.params(dtype), alone if vmap else state)
    return Module(model, ops(), dtype, joined=form == "joined states")


def named(gradients):
    """{name: gradient}, of a module or of a function."""
    return {k[0] if isinstance(k, tuple) else k: v for k, v in gradients.items()}


# --- drawing --------------------------------------------------------------------------------------


def draw_model(rng):
    """A model, of a `random.Random`."""
    count = rng.choice([1, 1, 2])
    layers = tuple(
        Layer(
            rng.choice(DRIVES), rng.choice(RECURRENT), rng.choice(CELLS), rng.choice([*ACTIVATIONS])
        )
        for _ in range(count)
    )
    return RandomModel(layers, rng.choice(("plain", *READOUTS)))


def draw_widely(rng, draw, features, count, tries=60):
    """Draw cases one after the other, each with as many new pairs of features as one finds.

    draw: rng -> a case. features: case -> {name: hashable value}.
    """
    seen, found = set(), []
    for _ in range(count):
        options = []
        for _ in range(tries):
            case = draw(rng)
            own = sorted(features(case).items())
            pairs = {(a, b) for i, a in enumerate(own) for b in own[:i]}
            options.append((len(pairs - seen), len(options), case, pairs))
        _, _, case, pairs = max(options, key=lambda option: option[:2])
        seen |= pairs
        found.append(case)
    return found
