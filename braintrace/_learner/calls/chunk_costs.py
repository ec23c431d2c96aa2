r"""Cost model of a sequence gradient, as a function of the chunk length.

Let ``T`` steps be split into ``n`` chunks of ``K``. Let ``m`` of them update the traces: all of
them, or, from zero traces, all but the last, whose traces are deferred. The time is about

.. math:: T s + n c + m u + m K e + T r \min(1, K / K_c) + n g + T g'

with the products of a step and its gradient in ``s``, the cost of a chunk itself in ``c``, reading
and writing the traces in ``u``, the contribution of a step to the traces in ``e``, and in ``r`` the
cost of residuals that leave the caches, as the residuals of ``K_c`` steps do. For every entry of a
sparse matrix two factors are gathered: ``g`` is the cost to gather them, for all steps of a chunk,
and ``g'`` the cost to multiply them in one step. All of it is computed from sizes, so the same
sequence always has the same chunks.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp

from ..._algorithms import ETraceAlgorithm
from ..._etrace_op import ETPPrimitive, get_primitive_spec, init_trace
from ..._graph import ETraceGraph, TraceSpec, specs_of
from ..._jax import Equation, open_jaxpr, sub_jaxprs


@dataclasses.dataclass(frozen=True)
class Rates:
    """Seconds per operation of a device; only their ratios matter.

    Attributes
    ----------
    flop
        Of a product.
    byte
        Of reading and writing a byte of the traces, or of residuals outside the caches.
    operation
        Of starting an operation.
    gather, gathered
        Of gathering the factors of one sparse entry, and of multiplying them in one step.
    """

    flop: float
    byte: float
    operation: float
    gather: float
    gathered: float


PROCESSOR = Rates(flop=2e-11, byte=2.5e-10, operation=1.8e-7, gather=1e-8, gathered=4e-10)
"""Fitted to the processor time of gradients with carried traces, on two cores of an AMD EPYC:
chunks of 8 to 256 steps, two GRU layers of 128 units (64 samples), three of 256, four leaky layers
of 256 (64), an LSTM of 256, four LRU layers of 128 (32 each), and an MGU of 128 (16). With 2e-10 s
per byte, the chosen chunk took at most 5 % more than the best one; but on two cores of an Intel
Xeon, with AVX-512, the leaky layers took 10 % more, and with 2.5e-10 s they have the best one there
too. The last two are from SDDMMs with 10^6 entries and 16 to 128 steps."""

ACCELERATOR = Rates(flop=5e-14, byte=2e-12, operation=5e-6, gather=0.0, gathered=4e-12)
"""Orders of magnitude, not measured: starting a small operation takes longer than running it."""

OPERATIONS_OF_CHUNK = 80
"""Number of operations of a chunk outside its steps, per operation of a step."""

CACHES = 128 * 2**20
"""Size of residuals that have all left the caches before they are read again."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Amount of work of a sequence gradient.

    Attributes
    ----------
    flops, operations
        Multiplications and additions in the products of the model's step, and its number of
        operations.
    passes
        Number of times that these products are computed, including the gradient.
    trace_bytes, trace_entries
        Size of the traces.
    record_bytes
        Residuals of a step.
    update_bytes
        Additional residuals of a step if the traces after its chunk are computed.
    gathered
        Number of entries of sparse matrices in gradients and traces.
    state_size
        Length of the flattened state of a sample, for rules that backpropagate from each state
        scalar.
    """

    flops: int
    operations: int
    passes: int
    trace_bytes: int
    trace_entries: int
    record_bytes: int
    update_bytes: int = 0
    gathered: int = 0
    state_size: int = 0

    def memory(self, steps: int, chunk: int, from_zero: bool) -> int:
        """Return the bytes of the residuals of a chunk; see `seconds`."""
        is_followed = chunk < steps or not from_zero
        return chunk * (self.record_bytes + is_followed * self.update_bytes)

    def seconds(self, steps: int, chunk: int, from_zero: bool, rates: Rates) -> float:
        """Return the time of a sequence with a chunk length.

        Parameters
        ----------
        steps, chunk
            Length of the sequence and of a chunk.
        from_zero
            Whether traces start from zero, and are deferred after the last chunk.
        rates
            Rates of the device.
        """
        chunks = math.ceil(steps / chunk)
        updates = chunks - 1 if from_zero else chunks
        entering = updates * chunk if from_zero else steps
        of_step = self.passes * self.flops * rates.flop + self.operations * rates.operation
        of_chunk = OPERATIONS_OF_CHUNK * self.operations * rates.operation
        recorded = self.memory(steps, chunk, from_zero)
        outside_caches = min(1.0, recorded / CACHES)
        of_transition = 2 * self.state_size * self.trace_entries * rates.flop
        return (
            steps * of_step
            + entering * self.state_size * self.flops * rates.flop
            + updates * of_transition
            + chunks * of_chunk
            + updates * self.trace_bytes * rates.byte
            + entering * 2 * self.trace_entries * rates.flop
            + steps * recorded / chunk * outside_caches * rates.byte
            + self.gathered * (chunks * rates.gather + steps * rates.gathered)
        )


def work_of(algorithm: ETraceAlgorithm, record_bytes: int, passes: int = 3) -> Work:
    """Return the amount of work of an algorithm's sequences.

    Parameters
    ----------
    algorithm
        The algorithm.
    record_bytes, passes
        See `Work`.
    """
    equations = algorithm.graph.traced.program.equations
    specs = specs_of(algorithm.compiled.trace_specs)
    flat = algorithm.graph.flat_state if algorithm.graph.passes_weights else None
    return Work(
        flops=sum(map(flops_of, equations)),
        operations=len(equations),
        passes=passes,
        trace_bytes=sum(spec.nbytes for spec in specs),
        trace_entries=sum(math.prod(spec.shape) for spec in specs),
        record_bytes=record_bytes,
        update_bytes=0 if flat is None else flat.update_bytes,
        gathered=_entries_of(algorithm.graph, specs),
        state_size=0 if flat is None else flat.size,
    )


def _entries_of(graph: ETraceGraph, specs: list[TraceSpec]) -> int:
    """Return the number of entries in the gradients and traces of sparse matrices."""
    operands = {
        (relation.key, name): math.prod(var.aval.shape)
        for relation in graph.hidden_param_op_relations
        for name, var in relation.trainable_vars.items()
        if (get_primitive_spec(relation.primitive).trace_axes or {}).get(name) == ("entry",)
    }
    traces = (spec for spec in specs if (spec.relation, spec.operand) in operands)
    sizes: list[int] = [*operands.values(), *(math.prod(spec.shape) for spec in traces)]
    return sum(sizes)


def flops_of(equation: Equation) -> int:
    """Return the multiplications and additions in the products of an equation.

    Products in a loop of unknown length count once.
    """
    name, params = equation.primitive.name, equation.params
    operands: list[tuple[int, ...]] = [atom.aval.shape for atom in equation.invars]
    results: list[tuple[int, ...]] = [var.aval.shape for var in equation.outvars]
    if isinstance(equation.primitive, ETPPrimitive):
        return _flops_of_marked(equation, equation.primitive)
    if name == "dot_general":
        (summed, _), _ = equation.params["dimension_numbers"]
        length: int = math.prod(operands[0][axis] for axis in summed)
        return 2 * math.prod(results[0]) * length
    if name == "conv_general_dilated":
        features = params["dimension_numbers"].rhs_spec[0]
        kernel = [size for axis, size in enumerate(operands[1]) if axis != features]
        return 2 * math.prod(results[0]) * math.prod(kernel)
    times: int = params["length"] if name == "scan" else 1
    bodies = (open_jaxpr(body)[0].eqns for body in sub_jaxprs(equation))
    return times * sum(map(flops_of, itertools.chain(*bodies)))


def _flops_of_marked(equation: Equation, primitive: ETPPrimitive) -> int:
    spec, (y,) = get_primitive_spec(primitive), equation.outvars
    positions = spec.resolve_trainable_invars(equation.params)
    weights = {name: equation.invars[position] for name, position in positions.items()}
    x = None if spec.x_invar_index is None else equation.invars[spec.x_invar_index]
    if x is not None and not jnp.issubdtype(x.aval.dtype, jnp.inexact):
        return 0  # a gather multiplies nothing
    # Each row of the output uses every weight, or the weights in its trace.
    rows = math.prod(y.aval.shape[:-1])
    trace = jax.eval_shape(lambda: init_trace(primitive, equation.params, x, y, weights))
    entries: int = max(math.prod(shape.shape) for shape in trace.values())
    met: int = rows * max(math.prod(weight.aval.shape) for weight in weights.values())
    return 2 * min(met, entries)
