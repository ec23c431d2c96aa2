"""Uses of parameters for full-Jacobian rules, with the samples of their elements.

Samples are independent if each element of an old state reaches the new states of one sample only.
The proof is a flow of labels (`_jaxpr.dataflow`) back through the step. It starts at the new
states, each labelled with its sample.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from .._errors import CompilationError
from .._etrace_op.registry import ETP_PRIMITIVE_SPECS
from .._graph.flat_state import ParameterUse
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import Equation, Var, is_var, source_line
from .._jaxpr.dataflow import BindingTime
from .._jaxpr.lattices import TOP, Flow, Labels, everything, filled, joined
from .._jaxpr.primitives import PRODUCTS
from .._jaxpr.program import carries_derivative
from .analysis import Analysis, alike, labels_back, times_of
from .batch import follow, laid_out


def new_vars(leaves: Sequence[StateLeaf]) -> list[Var]:
    """Return the new values of States."""
    return [leaf.out_var for leaf in leaves if leaf.out_var is not None]


class SampleFlow:
    """The samples whose new states each element of a step reaches.

    Parameters
    ----------
    traced, analysis, leaves
        The step, and its hidden states.
    shared
        Inputs that all samples share; parameter-derived values may depend on them.
    count, axes
        The number of samples, and their axis in each state; ``None``: a single sample.
    """

    def __init__(
        self,
        traced: TracedModel,
        analysis: Analysis,
        leaves: Sequence[StateLeaf],
        shared: set[Var],
        count: int,
        axes: Sequence[int | None],
    ) -> None:
        self._traced, self._analysis, self._leaves = traced, analysis, leaves
        times = times_of(traced, apart=shared)
        self._data = {var for var, time in times.items() if time is BindingTime.DATA}
        self._count = count
        self._of_shared = analysis.program.dependents_of(shared)
        self._axes = axes
        pairs = zip(leaves, axes, strict=True)
        self._of_states = [laid_out(leaf.shape, axis, count) for leaf, axis in pairs]
        starts: dict[Var, Flow] = {}
        for var, samples in zip(new_vars(leaves), self._of_states, strict=True):
            starts[var] = joined(Labels(), [starts.get(var), samples])
        found = labels_back(analysis, starts, special=self._back_through)
        self._reached, self._through = found

    def coupled(self) -> StateLeaf | None:
        """Return a state that depends on several samples, or has no axis for them."""
        for leaf, axis, own in zip(self._leaves, self._axes, self._of_states, strict=True):
            is_apart = self._count == 1 or axis is not None
            if not is_apart or not follow(self._reached.get(leaf.in_var), own):
                return leaf
        return None

    def uses(self) -> Iterator[ParameterUse]:
        """Yield the equations where parameter-derived values meet data."""
        program, new = self._analysis.program, new_vars(self._leaves)
        parameters = (leaf.in_var for leaf in self._traced.parameters)
        descendants = self._analysis.program.descendants(parameters)
        own, count = descendants - self._data, itertools.count()
        for index in program.making(self._analysis.program.ancestors(new) & descendants):
            equation = program.equations[index]
            read = [(i, atom) for i, atom in enumerate(equation.invars) if is_var(atom)]
            operands = [(i, a) for i, a in read if a in own and carries_derivative(a)]
            if operands and not self._data.isdisjoint(equation.outvars):
                key = f"{equation.primitive.name}{next(count)}"
                varies = any(atom in self._of_shared for _, atom in operands)
                yield self._use(key, index, tuple(i for i, _ in operands), varies)
        for number, var in enumerate(new):
            if var in own:
                place, varies = (number,), var in self._of_shared
                samples = (self._of_states[number],)
                key = f"state{next(count)}"
                yield ParameterUse(key, None, place, "elementwise", samples=samples, varies=varies)

    def _back_through(self, equation: Equation, results: Sequence[Flow]) -> list[Flow] | None:
        if self._count == 1:  # a single sample reaches itself
            return alike(equation, everything(Labels(), results))
        return self._through_batched(equation, results[0])

    def _through_batched(self, equation: Equation, samples: Flow) -> list[Flow] | None:
        """Return the samples that the operands of a batched ETP operation reach.

        Each sample of its output depends on that sample of its input, and on operands that samples
        share.
        """
        spec = ETP_PRIMITIVE_SPECS.get(equation.primitive)
        if spec is None or spec.x_invar_index is None or not spec.batched or samples is None:
            return None
        x, y = equation.invars[spec.x_invar_index], equation.outvars[0]
        others = [atom for atom in equation.invars if atom is not x and is_var(atom)]
        if not self._data.isdisjoint(others) or x.aval.shape[:1] != y.aval.shape[:1]:
            return None
        flows = alike(equation, everything(Labels(), [samples]))
        rows = Labels().over(samples, range(1, samples.ndim))
        rows = rows.reshape(-1, *[1] * (len(x.aval.shape) - 1))
        flows[spec.x_invar_index] = np.broadcast_to(rows, x.aval.shape)
        return flows

    def _use(self, key: str, index: int, operands: tuple[int, ...], varies: bool) -> ParameterUse:
        """Return a use with the samples of its elements."""
        equation, flow_of = self._analysis.program.equations[index], self._through.get
        use = functools.partial(ParameterUse, key, index, operands, varies=varies)
        x = self._input_of_product(equation, operands)
        if x is not None and self._count == 1:
            return use("product", x)
        inside = _filled((flow_of((index, i)), equation.invars[i].aval.shape) for i in operands)
        if inside is not None:
            return use("elementwise", samples=inside)
        if x is not None:
            of_x, of_y = flow_of((index, x)), self._reached.get(equation.outvars[0])
            x_axis, y_axis = (_axis_of_samples(flow, self._count) for flow in (of_x, of_y))
            if x_axis is not None and y_axis is not None:
                return use("product", x, x_axis, y_axis)
        results = (var for var in equation.outvars if carries_derivative(var))
        samples = _filled((self._reached.get(var), var.aval.shape) for var in results)
        if samples is not None:
            return use("any", samples=samples)
        raise CompilationError(
            f"In `{equation.primitive.name}` ({source_line(equation)}), one element of a "
            f"parameter-derived value reaches several of the {self._count} samples: an index "
            "gathers a row for all of them, a product uses the data of one, or an operation does "
            "not separate samples. Their gradients are summed there. Give each sample a separate "
            "value (`table[jnp.broadcast_to(index, batch)]`), or use D_RTRL."
        )

    def _input_of_product(self, equation: Equation, operands: Sequence[int]) -> int | None:
        """Return the operand of a product with parameters that contains the samples."""
        read = enumerate(equation.invars)
        others = [i for i, atom in read if is_var(atom) and atom in self._data]
        if len(others) != 1 or others[0] in operands:
            return None
        spec, name = ETP_PRIMITIVE_SPECS.get(equation.primitive), equation.primitive.name
        if spec is not None:
            return others[0] if others[0] == spec.x_invar_index else None
        return others[0] if name in PRODUCTS and (name == "dot_general" or others[0] == 0) else None


def _filled(flows: Iterable[tuple[Flow, tuple[int, ...]]]) -> tuple[np.ndarray, ...] | None:
    """Return the samples of all elements of arrays; ``None``: one element has several."""
    samples = tuple(filled(Labels(), flow, shape) for flow, shape in flows)
    return None if any(np.any(own == TOP) for own in samples) else samples


def _axis_of_samples(samples: Flow, count: int) -> int | None:
    """Return the axis of an array that runs over the samples, or ``None``.

    Elements that depend on no sample fit any axis.
    """
    shape = () if samples is None else samples.shape
    axes = (axis for axis, size in enumerate(shape) if size == count)
    return next((a for a in axes if follow(samples, laid_out(shape, a, count))), None)
