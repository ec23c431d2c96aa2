"""What a model of the catalogue is: a brainstate module, and what the compiler reports of it."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from recorded import RecordedCase, sequences

BATCH, INPUTS, H, OUTPUTS = 2, 3, 4, 2


@dataclass(frozen=True, eq=False)
class Model:
    """One model, which the oracles of `oracles.py` read as a case.

    module: its class.
    reported_relations: ``"parameters -> states"`` of every relation in program order; several
        groups are set apart by ``|``, states in alphabetical order.
    reported_groups: the states of every hidden group in alphabetical order, ``"V, a"``.
    diagnostics: what the compiler reports, as `verdict` has it.
    diagonal: every path from state to state is element by element, so D-RTRL equals BPTT.
    spiking: the module calls `marks.spike`.
    shape: of the input of one step.
    output: of the output of one step.
    canonical: {state: (function, inverse)} that bring states of one group into one layout.
    tested: {learning rule: the paths of `catalogue_runs.PATHS` that tests run}.

    Models of `basic.py` run with a batch axis of any length, or without one; all others with
    `BATCH` samples.
    """

    name: str
    module: Callable
    reported_relations: tuple[str, ...]
    reported_groups: tuple[str, ...]
    diagnostics: frozenset[str]
    diagonal: bool = False
    spiking: bool = False
    shape: tuple[int, ...] = (BATCH, INPUTS)
    output: tuple[int, ...] = (BATCH, OUTPUTS)
    canonical: Mapping = field(default_factory=dict)
    tested: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    loss = staticmethod(RecordedCase.loss)

    @property
    def costs_accuracy(self):
        """Whether the compiler warns, because something has no trace."""
        return any(found.endswith("warning") for found in self.diagnostics)

    @property
    def groups(self):
        """{group: (state, ...)}, in the order in which a step computes them."""
        return {group: tuple(group.split(", ")) for group in self.reported_groups}

    @property
    def relations(self):
        """{operation: the groups that its output reaches}, without the library."""
        return self.recorded().relations

    @property
    def broadcast(self):
        """Operations of which one output element may reach several elements."""
        return self.recorded().broadcast

    def build(self, dtype=None):
        """A fresh module whose states are not yet initialised."""
        brainstate.random.seed(7)
        module = self.module()
        for state in module.states(brainstate.ParamState).values():
            state.value = jax.tree.map(lambda leaf: leaf.astype(_dtype(dtype)), state.value)
        return module

    def started(self, batch=BATCH, dtype=None):
        """A fresh module with initialised states."""
        module = self.build(dtype)
        brainstate.nn.init_all_states(module, batch_size=batch)
        return module

    def recorded(self, batch=BATCH, dtype=None):
        """The case of one batch size and dtype, recorded once."""
        return _recorded(self, batch, _dtype(dtype))

    def params(self, dtype=np.float32):
        """{parameter: value}, the same at every call."""
        return self.recorded(dtype=dtype).params()

    def initial_states(self, batch=None, dtype=np.float32):
        """{state: value}, not zero, so that the first step counts."""
        return self.recorded(batch, dtype).states()

    def sequences(self, batch=None, length=6, dtype=np.float32, seed=1):
        """Seeded inputs and targets, time first, exact in single precision."""
        shapes = (_of_batch(shape, batch) for shape in (self.shape, self.output))
        xs, targets = sequences(*shapes, length, seed)
        return xs.astype(_dtype(dtype)), targets.astype(_dtype(dtype))

    def step(self, ops, params, states, x):
        """One step in plain JAX, with the operations and states as `ops` wants them."""
        return _BY_SHAPE[self, x.shape, x.dtype].step(ops, params, states, x)


_BY_SHAPE = {}


@functools.cache
def _recorded(model, batch, dtype):
    x = jnp.zeros(_of_batch(model.shape, batch), dtype)
    started = model.started(batch, dtype)
    case = RecordedCase(model.name, started, x, model.groups, model.canonical)
    _BY_SHAPE[model, x.shape, x.dtype] = case
    return case


def _of_batch(shape, batch):
    if batch == BATCH:
        return shape
    return shape[1:] if batch is None else (batch, *shape[1:])


def _dtype(dtype):
    """The floating-point dtype that JAX makes of one, or of Python's `float`."""
    return jax.dtypes.canonicalize_dtype(float if dtype is None else dtype)


def described(*relations, groups, diagnostics=(), **options):
    """Make a `Model` of the decorated module, under its class's name."""

    def model_of(module):
        return Model(
            name=module.__name__,
            module=module,
            reported_relations=relations,
            reported_groups=groups if isinstance(groups, tuple) else (groups,),
            diagnostics=frozenset(diagnostics),
            **options,
        )

    return model_of


def verdict(diagnostic):
    """A diagnostic as its kind and, if it is a warning, its level."""
    return diagnostic.kind + (", warning" if diagnostic.level == "warning" else "")


MODELS: list[Model] = []


def model(*relations, **options):
    """Add the decorated module to the catalogue."""

    def add(module):
        MODELS.append(described(*relations, **options)(module))
        return module

    return add


class Cell(brainstate.nn.Module):
    """A module whose weights and hidden states are declared by name and shape.

    weights: {name: shape, or a pytree of shapes}; drawn from one seeded generator.
    states_of: {name: shape of one sample}; the batch axis, if any, is put in front.
    gain: scale of the weight matrices.
    """

    weights: dict = {}
    states_of: dict = {}
    gain = 1.0

    def __init__(self):
        super().__init__()
        generator = np.random.default_rng(0)
        for name, shape in self.weights.items():
            drawn = jax.tree.map(lambda s: _draw(generator, s, self.gain), shape, is_leaf=_is_shape)
            setattr(self, name, brainstate.ParamState(drawn))

    def init_state(self, batch_size=None, **_):
        for name, value in self._starts(batch_size).items():
            setattr(self, name, brainstate.HiddenState(value))

    def reset_state(self, batch_size=None, **_):
        for name, value in self._starts(batch_size).items():
            getattr(self, name).value = value

    def _starts(self, batch_size):
        lead = () if batch_size is None else (batch_size,)
        weights = jax.tree.leaves(
            [state.value for state in self.states(brainstate.ParamState).values()]
        )
        return {
            name: jnp.broadcast_to(start(shape), (*lead, *shape)).astype(weights[0].dtype)
            for name, shape in self.states_of.items()
        }


def start(shape):
    """Values of an initial state: not zero, so that the first step counts."""
    values = np.linspace(-0.3, 0.5, int(np.prod(shape))).reshape(shape)
    return jnp.asarray(values.astype(np.float32), float)


def _draw(generator, shape, gain):
    scale = gain / np.sqrt(np.prod(shape[:-1])) if len(shape) > 1 else 0.5
    return jnp.asarray((scale * generator.standard_normal(shape)).astype(np.float32), float)


def _is_shape(value):
    return isinstance(value, tuple) and all(isinstance(n, int) for n in value)


REFUSED = {
    "DelayedRecurrence": "carries values that depend on weights",
    "DelayedSelfInhibition": "carries values that depend on weights",
    "FilteredReadout": "carries values that depend on weights",
}
"""What rules of the whole state say of models that they refuse."""
