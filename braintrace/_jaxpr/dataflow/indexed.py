"""Moves of elements, those included whose operands are indices.

Where the indices are constants, each element is followed to its place. Where data choose the
place, an element may be at any place along the indexed axes.
"""

from collections.abc import Sequence

import jax
import numpy as np

from ..._jax import Atom, Equation
from ..data_movement import moved, moved_operands, source_map
from .constants import Constants
from .lattices import Flow, Lattice, along, everything, joined, spread, taken


def move(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow] | None:
    """Follow a move; ``None`` where its places depend on what is followed, or on data."""
    carried = moved_operands(equation)
    if any(flow is not None for i, flow in enumerate(operands) if i not in carried):
        return None
    flows = [full(lattice, equation, operands, i) for i in carried]
    found = None if lattice.rank else moved(equation, flows)
    if found is not None:
        return [*found]
    sources = constants.sources(equation)
    return None if sources is None else [taken(lattice, flows, source) for source in sources]


def full(lattice: Lattice, equation: Equation, operands: Sequence[Flow], index: int) -> np.ndarray:
    """Return the flow of an operand, least entries included."""
    flow = operands[index]
    return lattice.empty(equation.invars[index].aval.shape) if flow is None else flow


def _with_places(
    lattice: Lattice, equation: Equation, flow: Flow, places: Sequence[Flow]
) -> list[Flow]:
    """Return the flow of a result whose every element depends on some indices as well."""
    shape = equation.outvars[0].aval.shape
    one = everything(lattice, places)
    return [joined(lattice, [flow, None if one is None else spread(lattice, one, shape)])]


def _first_places(atom: Atom) -> np.ndarray:
    return np.zeros(atom.aval.shape, atom.aval.dtype)


def gather(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow]:
    """Follow a gather; each slice depends on its own index."""
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
        flow = taken(lattice, [flow], sources[0])
    if places is not None:
        of_slices = lattice.over(places, [len(equation.invars[1].aval.shape) - 1])
        places = spread(lattice, np.expand_dims(of_slices, tuple(numbers.offset_dims)), shape)
    return [joined(lattice, [flow, places])]


def scatter(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow] | None:
    """Follow updates to where they are put; a plain ``scatter`` writes over what was there."""
    _, places, updates = operands
    if places is not None:
        return None
    base = full(lattice, equation, operands, 0)
    is_plain = equation.primitive.name == "scatter"
    if is_plain and equation.params["update_jaxpr"] is not None:  # `.at[...].apply`
        return [base]
    indices = constants.value(equation.invars[1])
    if indices is not None:
        targets = _targets(equation, indices)
        base = _cleared(lattice, base, targets) if is_plain else base
        return [base if updates is None else lattice.put(base, targets, updates)]
    if updates is None:
        return [base]
    looked_up = equation.params["dimension_numbers"].scatter_dims_to_operand_dims
    shape = equation.invars[0].aval.shape
    targets = _targets(equation, _first_places(equation.invars[1]))
    put = lattice.put(lattice.empty(shape), targets, updates)
    return [lattice.join(base, spread(lattice, along(lattice, put, tuple(looked_up)), shape))]


def _targets(equation: Equation, indices: np.ndarray) -> np.ndarray:
    """Return the number of the element that each update is put into; their count stands for none.

    These are the elements that a gather reads at the same indices.
    """
    operand, updates = equation.invars[0].aval, equation.invars[2].aval
    numbers, mode = equation.params["dimension_numbers"], equation.params["mode"]
    inserted = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = iter([updates.shape[axis] for axis in numbers.update_window_dims])
    sizes = [1 if axis in inserted else next(windows) for axis in range(len(operand.shape))]
    read = jax.lax.GatherDimensionNumbers(
        offset_dims=numbers.update_window_dims,
        collapsed_slice_dims=numbers.inserted_window_dims,
        start_index_map=numbers.scatter_dims_to_operand_dims,
        operand_batching_dims=numbers.operand_batching_dims,
        start_indices_batching_dims=numbers.scatter_indices_batching_dims,
    )
    is_clipped = mode == jax.lax.GatherScatterMode.CLIP
    with jax.ensure_compile_time_eval():
        every = np.arange(operand.size, dtype=np.int32).reshape(operand.shape)
        found = jax.lax.gather(
            every,
            indices,
            read,
            sizes,
            mode="clip" if is_clipped else "fill",
            fill_value=operand.size,
        )
        return np.asarray(found)


def _cleared(lattice: Lattice, base: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return a flow without some elements, which are written over."""
    kept = np.ones(int(np.prod(base.shape[: base.ndim - lattice.rank])) + 1, bool)
    kept[targets.ravel()] = False
    shape = base.shape[: base.ndim - lattice.rank]
    numbers = np.where(kept[:-1], np.arange(len(kept) - 1), -1).reshape(shape)
    return taken(lattice, [base], numbers)


def dynamic_slice(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow]:
    """Follow a slice; data choose where it begins along the axes that it cuts."""
    flow, *places = operands
    if flow is not None:
        whole, cut = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        found = move(lattice, equation, [flow, *[None] * len(places)], constants)
        axes = tuple(axis for axis, size in enumerate(cut) if size != whole[axis])
        flow = spread(lattice, along(lattice, flow, axes), cut) if found is None else found[0]
    return _with_places(lattice, equation, flow, places)


def dynamic_update_slice(
    lattice: Lattice, equation: Equation, operands: Sequence[Flow], constants: Constants
) -> list[Flow]:
    """Follow what is written to a slice; data choose where it begins."""
    base, update, *places = operands
    found = None
    if base is not None or update is not None:
        found = move(lattice, equation, [base, update, *[None] * len(places)], constants)
    if found is not None:
        return _with_places(lattice, equation, found[0], places)
    if update is not None:
        shape, cut = (equation.invars[i].aval.shape for i in range(2))
        axes = tuple(axis for axis, size in enumerate(cut) if size != shape[axis])
        update = spread(lattice, along(lattice, update, axes), shape)
    return _with_places(lattice, equation, joined(lattice, [base, update]), places)
