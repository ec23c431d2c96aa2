"""Rules for data movement, with or without index operands.

With constant indices, each element is followed to its place. With data-dependent indices, an
element may be at any place along the indexed axes.
"""

from collections.abc import Sequence

import numpy as np

from ..._jax import Atom, Equation
from ..data_movement import NOWHERE, elements_of_slices, moved, moved_operands, source_map
from .constants import Constants
from .lattices import Flow, Lattice, along, everything, filled, joined, spread, taken


def move(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow] | None:
    """Follow a move; ``None`` if its places depend on a followed value or on data."""
    carried = moved_operands(equation)
    if any(flow is not None for i, flow in enumerate(operands) if i not in carried):
        return None
    flows = [filled(lattice, operands[i], equation.invars[i].aval.shape) for i in carried]
    results = None if lattice.rank else moved(equation, flows)
    if results is not None:
        return [*map(lattice.moved, results)]
    sources = constants.sources(equation)
    if sources is None:
        return None
    return [lattice.moved(taken(lattice, flows, source)) for source in sources]


def _with_places(
    lattice: Lattice, equation: Equation, flow: Flow, places: Sequence[Flow]
) -> list[Flow]:
    """Return the flow of a result whose elements all depend on some indices as well."""
    shape = equation.outvars[0].aval.shape
    one = everything(lattice, places)
    return [joined(lattice, [flow, None if one is None else spread(lattice, one, shape)])]


def _first_places(atom: Atom) -> np.ndarray:
    return np.zeros(atom.aval.shape, atom.aval.dtype)


def gather(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow]:
    """Follow a gather; each slice depends on one index."""
    flow, places = operands
    numbers, shape = equation.params["dimension_numbers"], equation.outvars[0].aval.shape
    if flow is not None:
        sources = constants.sources(equation)
        if sources is None:
            looked_up = tuple(numbers.start_index_map)
            size = equation.invars[0].aval.shape
            flow = spread(lattice, along(lattice, flow, looked_up), size)
            sources = source_map(equation, _first_places)
            assert sources is not None
        flow = lattice.moved(taken(lattice, [flow], sources[0]))
    if places is not None:
        of_slices = lattice.over(places, [len(equation.invars[1].aval.shape) - 1])
        places = spread(lattice, np.expand_dims(of_slices, tuple(numbers.offset_dims)), shape)
    return [joined(lattice, [flow, places])]


def scatter(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow] | None:
    """Follow updates to their places; a plain ``scatter`` overwrites old elements."""
    base, places, updates = operands
    if places is not None:
        return None
    shape = equation.invars[0].aval.shape
    base = filled(lattice, base, shape)
    updates = None if updates is None else lattice.moved(updates)
    is_plain = equation.primitive.name == "scatter"
    if is_plain and equation.params["update_jaxpr"] is not None:  # `.at[...].apply`
        return [base]
    indices = constants.value(equation.invars[1])
    if indices is not None:
        targets = elements_of_slices(equation, indices)
        base = _cleared(lattice, base, targets) if is_plain else base
        return [base if updates is None else lattice.put(base, targets, updates)]
    if updates is None:
        return [base]
    looked_up = equation.params["dimension_numbers"].scatter_dims_to_operand_dims
    targets = elements_of_slices(equation, _first_places(equation.invars[1]))
    put = lattice.put(lattice.empty(shape), targets, updates)
    return [lattice.join(base, spread(lattice, along(lattice, put, tuple(looked_up)), shape))]


def _cleared(lattice: Lattice, base: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return a flow without some elements, which are overwritten."""
    shape = base.shape[: base.ndim - lattice.rank]
    sources = np.arange(int(np.prod(shape)))
    sources[targets[targets != NOWHERE]] = NOWHERE
    return taken(lattice, [base], sources.reshape(shape))


def dynamic_slice(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow]:
    """Follow a slice with a data-dependent start along the axes that it shortens."""
    flow, *places = operands
    if flow is not None:
        whole, cut = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        results = move(lattice, equation, [flow, *[None] * len(places)], constants)
        axes = tuple(axis for axis, size in enumerate(cut) if size != whole[axis])
        flow = spread(lattice, along(lattice, flow, axes), cut) if results is None else results[0]
    return _with_places(lattice, equation, flow, places)


def dynamic_update_slice(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow]:
    """Follow a write to a slice with a data-dependent start."""
    base, update, *places = operands
    results = None
    if base is not None or update is not None:
        results = move(lattice, equation, [base, update, *[None] * len(places)], constants)
    if results is not None:
        return _with_places(lattice, equation, results[0], places)
    if update is not None:
        shape, cut = (equation.invars[i].aval.shape for i in range(2))
        axes = tuple(axis for axis, size in enumerate(cut) if size != shape[axis])
        update = spread(lattice, along(lattice, update, axes), shape)
    return _with_places(lattice, equation, joined(lattice, [base, update]), places)
