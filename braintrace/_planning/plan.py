"""Plan: the memory and operations of a learner on each device, before allocation."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from .._algorithms import ETraceAlgorithm
from .._arguments import (
    BOOLEAN,
    MODEL,
    POSITIVE,
    check_arrays,
    check_option,
    check_takes,
    check_tree,
    one_of,
    wrong_names,
)
from .._errors import BraintraceError, OptionError
from .._jax import struct_of
from .._learner.calls.options import FIELDS, METHODS, Options
from .._rules import Rule
from .._tables import Part, Table, as_html, as_text
from .._typing import PyTree
from .division import Array, Parts, parts_of, size_of
from .flops import arithmetic
from .program import Workload, program_for

SHORTER = (4, 32, 256)
"""Factors by which shorter chunks are tried."""
MORE = (2, 4, 8, 16, 32, 64)
"""Factors by which more devices are tried."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A change that reduces memory, and its result.

    Attributes
    ----------
    what
        The change as text.
    total
        Bytes on each device with this change.
    fits
        Whether the plan then fits.
    """

    what: str
    total: int
    fits: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory and operations of one call of a learner on each device; ``print`` shows a table.

    Attributes
    ----------
    method, steps, chunk_size, devices
        Method of the learner, number of steps, length of the chunks, number of devices.
    parameters, states, traces, optimizer
        Bytes of the learner's arrays.
    records
        Bytes of the residuals of one chunk.
    arguments, results, aliased, temp
        Bytes of the compiled program: arguments, results, results in the memory of arguments, and
        temporary buffers.
    total
        Total bytes: arguments, results and temporary buffers, each once, and the state of an
        optimizer if the program does not contain it.
    flops
        Floating-point operations per step: forward, backward, traces and update.
    memory
        Bytes of memory of a device; ``None``: unknown.
    changes
        Changes that take less memory, if the plan does not fit.
    """

    method: str
    steps: int
    chunk_size: int
    devices: int
    parameters: int
    states: int
    traces: int
    optimizer: int
    records: int
    arguments: int
    results: int
    aliased: int
    temp: int
    total: int
    flops: int
    memory: int | None = None
    changes: tuple[Change, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether a device has enough memory; ``None`` if its memory is unknown."""
        return None if self.memory is None else self.total <= self.memory

    def __str__(self) -> str:
        return as_text(self._parts())

    def _repr_html_(self) -> str:
        return as_html(self._parts())

    def _parts(self) -> Iterator[Part]:
        where = "a device" if self.devices == 1 else f"each of {self.devices} devices"
        chunk = f"chunks of {self.chunk_size}"
        title = f"`{self.method}` of {self.steps} steps in {chunk} on {where}"
        yield self._table(title, ("parameters", "states", "traces", "optimizer", "records"))
        yield self._table("Its program", ("arguments", "results", "aliased", "temp"))
        yield f"In all {self.total:,} bytes, and {self.flops:,} operations per step"
        if self.memory is not None:
            verdict = "It fits" if self.fits else "It does not fit"
            yield f"{verdict}: a device has {self.memory:,} bytes"
        if self.changes:
            rows = [[c.what, f"{c.total:,}", "yes" if c.fits else "no"] for c in self.changes]
            heads = ["change", "bytes", "fits"]
            yield Table("What takes less", heads, rows, numbers=[1], is_ruled=True)

    def _table(self, title: str, names: tuple[str, ...]) -> Table:
        rows = [[name, f"{getattr(self, name):,}"] for name in names]
        return Table(title, ["of each device", "bytes"], rows, numbers=[1], is_ruled=True)


def plan(
    network: brainstate.nn.Module | Callable[[], brainstate.nn.Module],
    algorithm: str | type[ETraceAlgorithm] | Rule,
    /,
    *example_arguments: PyTree,
    batch_size: int | None = None,
    vmap: bool = False,
    rules: Mapping[Any, Any] | None = None,
    method: str = "etrace_grad",
    steps: int = 1,
    from_zero: bool = True,
    chunk_size: int | str | None = "auto",
    memory_budget: int | None = None,
    every: int = 1,
    optimizer: Any = None,
    mesh: Any = None,
    data: str | None = "data",
    model: str | None = None,
    memory: int | None = None,
    **algorithm_options: Any,
) -> Plan:
    """Compute the memory and operations of a learner on each device, without allocating them.

    The model is created and analysed with shapes instead of numbers, and XLA compiles the program
    of one of the learner's methods.

    Parameters
    ----------
    network
        A model, or a function that returns one: then the parameters are not allocated either.
    algorithm, *example_arguments, batch_size, vmap, rules, **algorithm_options
        See `compile`. Arguments may be `jax.ShapeDtypeStruct`.
    method
        ``'etrace_grad'``, ``'etrace_online'``, ``'etrace_evolve'`` or ``'predict'``. The loss is
        the sum of squares of the model's output.
    steps
        Length of the sequences.
    from_zero
        For ``'etrace_grad'``: whether the call starts with zero traces, as after a reset.
    chunk_size, memory_budget, every
        See `Learner.etrace_grad` and `Learner.etrace_online`. ``'auto'`` chooses as it would on
        this machine.
    optimizer
        An ``optax.GradientTransformation``, whose state is counted; ``None``: no optimizer.
    mesh
        A `jax.sharding.Mesh` or `AbstractMesh`, or a dict of the lengths of its axes. The devices
        need not exist. ``None``: one device.
    data, model
        Axes of the mesh over which samples and outputs are sharded; see `shard`.
    memory
        Bytes of memory of a device. If the plan needs more, it lists changes: shorter chunks,
        traces in ``bfloat16``, `ES_D_RTRL`, more devices.

    Returns
    -------
    Plan
        Bytes of states, traces, arguments and results follow from shapes. Bytes of temporary
        buffers are XLA's numbers for this machine's kind of device, without the buffers of
        collectives between devices.

    Raises
    ------
    OptionError
        For an option value that is not accepted, or a model that cannot be created without numbers.
    ShapeError
        For a batch size that is not a multiple of the number of parts.
    CompilationError, DtypeError, UnitError
        See `compile`.

    Examples
    --------
    >>> import braintrace, jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((64, 100), jnp.float32)
    >>> plan = braintrace.plan(
    ...     lambda: braintrace.nn.GRUCell(100, 4000),
    ...     "d_rtrl",
    ...     x,
    ...     batch_size=64,
    ...     method="etrace_online",
    ...     memory=80 * 10**9,
    ... )
    >>> plan.traces, plan.fits
    (12598272000, True)
    """
    check_option("method", method, one_of(*METHODS))
    check_option("steps", steps, POSITIVE)
    check_option("from_zero", from_zero, BOOLEAN)
    check_option("memory", memory, POSITIVE.or_else(None))
    given = {"chunk_size": chunk_size, "memory_budget": memory_budget, "every": every}
    options = _options_of(method, given)
    is_made = isinstance(network, brainstate.nn.Module)
    if not (is_made or callable(network)):
        check_option("network", network, MODEL)
    if not is_made:
        check_takes("network", network, (), "no argument")
    work = Workload(
        make=functools.partial(brainstate.graph.clone, network) if is_made else network,
        algorithm=algorithm,
        compile_options={"vmap": vmap, "rules": rules, **algorithm_options},
        example=_shapes_of(example_arguments),
        batch_size=batch_size,
        method=method,
        options=options,
        steps=steps,
        from_zero=from_zero,
        optimizer=optimizer,
    )
    parts = parts_of(mesh, data, model)
    found = _planned(work, parts, memory)
    if found.fits is not False:
        return found
    return dataclasses.replace(found, changes=tuple(_changes(work, parts, found)))


def _options_of(method: str, given: Mapping[str, Any]) -> Options:
    """Return the options of a method; options that it does not have keep their default."""
    chosen = {name: value for name, value in given.items() if value is not FIELDS[name].default}
    wrong = wrong_names(chosen, {name: False for name in given if name in METHODS[method]})
    if wrong is not None:
        raise OptionError(f"`plan` of `{method}` {wrong}")
    return Options(**chosen)


def _shapes_of(arguments: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    def of_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
        return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else struct_of(jax.typeof(leaf))

    for index, argument in enumerate(arguments):
        check_tree(f"example_arguments[{index}]", argument)
        is_shape = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(argument)]
        if not all(is_shape):
            check_arrays(f"example_arguments[{index}]", argument)
    shapes: tuple[PyTree, ...] = jax.tree.map(of_leaf, arguments)
    return shapes


def _planned(work: Workload, parts: Parts, memory: int | None) -> Plan:
    program = program_for(work, parts)

    def total(found: Iterable[Array]) -> int:
        return sum(size_of(a) // (parts.model if a.is_sharded else 1) for a in found)

    # Each device slices the indices of its sparse entries from a constant.
    places = total(program.places) if parts.model > 1 else 0
    shares = parts.model if program.sharded else 1
    found = Plan(
        method=work.method,
        steps=work.steps,
        chunk_size=program.chunk_size,
        devices=parts.devices,
        parameters=total(program.parameters),
        states=total(program.states),
        traces=total(program.traces),
        optimizer=total(program.optimizer),
        records=program.records // shares,
        arguments=total(program.arguments),
        results=total(program.results),
        aliased=total(program.aliased),
        temp=program.temp_bytes() // shares + places,
        total=0,
        flops=arithmetic(program.traced.jaxpr) // work.steps // shares,
        memory=memory,
    )
    outside = 0 if work.method == "etrace_online" else found.optimizer
    once = found.arguments + found.results - found.aliased
    return dataclasses.replace(found, total=once + found.temp + outside)


def _changes(work: Workload, parts: Parts, found: Plan) -> Iterator[Change]:
    """Yield possible changes: for each kind, the first that fits, or the last."""

    def first(kind: Iterator[tuple[str, Workload, Parts]]) -> Iterator[Change]:
        change = None
        for what, other, sharded in kind:
            try:
                total = _planned(other, sharded, found.memory).total
            except BraintraceError:  # the rule refuses the model, or the batch is not divisible
                continue
            change = Change(what, total, total <= (found.memory or 0))
            if change.fits:
                break
        if change is not None and change.total < found.total:
            yield change

    yield from first(_shorter_chunks(work, parts, found))
    yield from first(_half_traces(work, parts))
    yield from first(_factored_traces(work, parts))
    yield from first(_more_devices(work, parts))


def _shorter_chunks(
    work: Workload, parts: Parts, found: Plan
) -> Iterator[tuple[str, Workload, Parts]]:
    lengths = [found.chunk_size // n for n in SHORTER if found.chunk_size >= n]
    for length in lengths if work.method in ("etrace_grad", "etrace_evolve") else []:
        options = dataclasses.replace(work.options, chunk_size=length, memory_budget=None)
        yield f"chunk_size={length}", dataclasses.replace(work, options=options), parts


def _half_traces(work: Workload, parts: Parts) -> Iterator[tuple[str, Workload, Parts]]:
    if work.compile_options.get("trace_dtype") is None:
        options = {**work.compile_options, "trace_dtype": jnp.bfloat16}
        half = dataclasses.replace(work, compile_options=options)
        yield "trace_dtype=jnp.bfloat16", half, parts


def _factored_traces(work: Workload, parts: Parts) -> Iterator[tuple[str, Workload, Parts]]:
    yield "'es_d_rtrl'", dataclasses.replace(work, algorithm="es_d_rtrl"), parts


def _more_devices(work: Workload, parts: Parts) -> Iterator[tuple[str, Workload, Parts]]:
    for times in MORE:
        more = dataclasses.replace(parts, data=parts.data * times)
        yield f"{more.devices} devices, the batch divided by {more.data}", work, more
