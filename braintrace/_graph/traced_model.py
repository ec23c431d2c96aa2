"""Traced model: one step as a flat program with named inputs and outputs, and its samples."""

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np

from .._checks import path_name
from .._errors import ShapeError
from .._jax import Atom, Var, struct_of
from .._jax_kernels import MIRROR
from .._jaxpr.primitives import COPIES, moved_operands
from .._jaxpr.program import Program, evaluate
from .._typing import Path, PyTree
from .report import Diagnostic

StateKind = Literal["hidden", "parameter", "random", "other"]
"""The kind of a State in a step."""


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """One array of one State.

    Attributes
    ----------
    path
        Path of the State in the model; States outside the model are under ``'<outside>'``.
    leaf
        Index of the leaf within the State's value.
    kind
        The kind of the State.
    is_grouped
        Whether it has several states along its last axis (`HiddenGroupState`).
    per_sample
        Whether each sample has a value of its own (`ShortTermState`).
    in_var, out_var
        Value before the step, and after it (``None`` if the step does not write it).
    """

    path: Path
    leaf: int
    kind: StateKind
    is_grouped: bool
    per_sample: bool
    in_var: Var
    out_var: Atom | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the leaf, batch axis included."""
        return tuple(self.in_var.aval.shape)

    @property
    def dtype(self) -> Any:
        return self.in_var.aval.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * int(np.dtype(self.dtype).itemsize)

    @property
    def name(self) -> str:
        """Printed form: the path, and the leaf if there are several."""
        return path_name(self.path) + (f"#{self.leaf}" if self.leaf else "")


@dataclasses.dataclass(frozen=True, eq=False)
class Ring:
    """A ring buffer, which is a shift register in the program of a step.

    Attributes
    ----------
    state, counter
        Indices of its leaf, and of the leaf of a counter.
    axis, newest_first
        Axis of the slots, and their order in the register.
    first
        The slot that is the first of the register when the counter is zero.
    """

    state: int
    counter: int
    axis: int
    newest_first: bool
    first: int

    def start(self, counter: Any) -> Any:
        """Return the place where `mirrored` turns the ring buffer into the register, and back."""
        return self.first + counter if self.newest_first else self.first - counter


FILTERS = "<filters>"
"""First part of the path of a filter that the compiler has added to a step. The name of its readout
is the second."""


@dataclasses.dataclass(frozen=True, eq=False)
class TracedModel:
    """One step of a model as plain data.

    ``is_marked_automatically`` is true if the compiler has marked parameters itself; ``unmarked``
    has diagnostics for the uses that it could not mark. ``readouts`` has the paths of the
    parameters of each leaky readout, by name. The leaves and inputs of their filters come last, and
    ``unfiltered`` is the model without them. ``rings`` are the ring buffers.
    """

    program: Program
    leaves: tuple[StateLeaf, ...]
    argument_vars: tuple[Var, ...]
    argument_roots: tuple[str, ...]
    argument_names: tuple[str, ...]
    argument_tree: PyTree
    state_trees: Mapping[Path, PyTree]
    output_atoms: tuple[Atom, ...]
    output_tree: PyTree
    parameter_paths: tuple[Path, ...]
    batch_size: int | None
    is_marked_automatically: bool = False
    unmarked: tuple[Diagnostic, ...] = ()
    readouts: Mapping[str, tuple[Path, ...]] = dataclasses.field(default_factory=dict)
    unfiltered: "TracedModel | None" = None
    rings: tuple[Ring, ...] = ()

    @property
    def parameters(self) -> tuple[StateLeaf, ...]:
        """The parameters that the step reads."""
        return tuple(leaf for leaf in self.leaves if leaf.kind == "parameter")

    @property
    def filters(self) -> tuple[StateLeaf, ...]:
        """The filters of the readouts."""
        return tuple(leaf for leaf in self.leaves if leaf.path[0] == FILTERS)

    @property
    def filtered(self) -> tuple[StateLeaf, ...]:
        """The readouts: hidden states whose derivative goes through filters."""
        return tuple(leaf for leaf in self.leaves if leaf.name in self.readouts)

    @functools.cached_property
    def may_delay(self) -> bool:
        """Whether a hidden state may hold earlier values: a step moves its elements."""
        hidden = (leaf for leaf in self.written if leaf.kind == "hidden")
        makers = (self.program.maker(leaf.out_var) for leaf in hidden)
        return any(e is None or moved_operands(e) or e.primitive.name in COPIES for e in makers)

    @functools.cached_property
    def written(self) -> tuple[StateLeaf, ...]:
        """The State leaves that the step writes."""
        return tuple(leaf for leaf in self.leaves if leaf.out_var is not None)

    @functools.cached_property
    def written_vars(self) -> list[Var]:
        """Input variables of the State leaves that the step writes."""
        return [leaf.in_var for leaf in self.written]

    @functools.cached_property
    def written_paths(self) -> tuple[Path, ...]:
        """Paths of the States that the step writes."""
        return tuple(dict.fromkeys(leaf.path for leaf in self.written))

    def mirror_rings(self, values: Mapping[Var, Any]) -> dict[Var, Any]:
        """Return values of leaves with registers for ring buffers, or the other way round."""
        mirrored = dict(values)
        for ring in self.rings:
            state, counter = self.leaves[ring.state].in_var, self.leaves[ring.counter].in_var
            start = ring.start(values[counter])
            mirrored[state] = MIRROR.bind(values[state], start, axis=ring.axis)
        return mirrored


# --- samples

Axes = tuple[int | None, ...]
"""The batch axis of each leaf of a State's value; ``None``: all samples share the leaf."""


def checkpointed_bytes(model: TracedModel, steps: int) -> int:
    """Return about how much backpropagation through time in ``sqrt(steps)`` checkpoints holds.

    These are the States before each part, and for each step of one part what its transpose reads.
    """
    program, parts = model.program, math.ceil(math.sqrt(steps))
    given = [struct_of(var.aval) for var in program.in_vars]

    def transpose(values: list[Any]) -> Any:
        def run(values: list[Any]) -> list[Any]:
            inputs = dict(zip(program.in_vars, values, strict=True))
            return evaluate(program, program.out_atoms, inputs)

        return jax.vjp(run, values)[1]

    read = collections.Counter(map(struct_of, jax.tree.leaves(jax.eval_shape(transpose, given))))
    read -= collections.Counter(struct_of(leaf.in_var.aval) for leaf in model.parameters)
    of_step = sum(shape.size * shape.dtype.itemsize * count for shape, count in read.items())
    of_states = sum(leaf.nbytes for leaf in model.written)
    return parts * of_states + math.ceil(steps / parts) * of_step


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """The batch axis of each State that is reset with a sequence.

    It is known from ``vmap=True``, or from the ``batch_size`` of ``init_state`` (see `batch_of` of
    the compiler).

    Attributes
    ----------
    samples
        Number of samples; ``None``: the model has no batch axis.
    axes
        The batch axes, by path of the State. A leaf without one is shared by all samples; it is
        reset when all of them are.
    unclear
        States with an unknown batch axis.
    """

    samples: int | None
    axes: Mapping[Path, Axes]
    unclear: tuple[Path, ...] = ()

    def axis(self, leaf: StateLeaf) -> int | None:
        """Return the batch axis of an input of the step; ``None``: it has none."""
        return self.axis_at(leaf.path, leaf.leaf)

    def axis_at(self, path: Path, index: int) -> int | None:
        """Return the batch axis of one leaf of a State's value; ``None``: it has none."""
        return self.axes[path][index] if path in self.axes else None

    def check(self, given: str, count: int) -> None:
        """Refuse flags per sample that do not fit the samples of the model.

        Parameters
        ----------
        given, count
            Description of the flags, for the message, and their number.

        Raises
        ------
        ShapeError
            If they do not fit.
        """
        for path in self.unclear:
            raise ShapeError(
                f"{given}, but the samples of State '{path_name(path)}' are unknown: none of its "
                "axes follows `batch_size`. Create it in `init_state` with an axis of this size, "
                "or give one flag for all samples."
            )
        if self.samples != count:
            raise ShapeError(
                f"{given}, but the States of the model are for {self.samples or 'no'} samples. "
                "Compile with `batch_size` (or `vmap=True`), or give one flag for all."
            )
