"""Canonicalisation: rewrite a step into the form that the analyses read.

`evaluate_inlined` inlines calls. The rules here

- make broadcasts explicit, so that an elementwise equation has operands of one shape only, and
  every fan-out has its own variable; a product without a sum (an outer product,
  ``einsum('bh,h->bh')``) is such an equation;
- replace a custom forward derivative that couples elements (the solver of a neuron with
  compartments) by a program with that derivative;
- lower a branch that contains an ETP operation to all its cases and a ``select``;
- unroll a scan of known length that contains one, or that couples the elements of hidden states.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._checks import path_name
from .._errors import CompilationError
from .._etrace_op.registry import holds_marked
from .._graph.traced_model import StateLeaf, TracedModel
from .._jax import (
    Aval,
    ClosedJaxpr,
    Equation,
    Var,
    bind,
    equations_inside,
    is_tracer,
    scan_counts,
    source_line,
    strongly_typed,
    sub_jaxprs,
    trace_to_jaxpr,
)
from .._jax_kernels import with_derivative_of
from .._jaxpr.primitives import ELEMENTWISE, IN_ORDER, letters_of
from .._jaxpr.program import (
    Program,
    Rule,
    Rules,
    carries_derivative,
    evaluate_all,
    evaluate_inlined,
    inlined,
    program_of,
    split_scan,
)
from .hidden_groups import written


def rewritten(traced: TracedModel, unroll_limit: int, shows_tangents: bool) -> TracedModel:
    """Return a step in the form that the analyses read, for all samples.

    Parameters
    ----------
    traced
        The step; it has no calls.
    unroll_limit
        Longest scan that is unrolled.
    shows_tangents
        Whether custom derivatives that couple elements become programs. Rules that follow the
        whole state need no elements, and compile the shorter program.
    """
    step = functools.partial(_run_step, traced, _rewriting(unroll_limit, shows_tangents))
    if traced.batch_size is None:
        avals = [var.aval for var in traced.program.in_vars]
        return with_program(traced, program_of(trace_to_jaxpr(step, avals)))
    # Vmapping adds broadcasts.
    mapped = inlined(_mapped(step, traced, traced.batch_size), spell_out_broadcasts)
    return with_program(traced, program_of(mapped))


def _run_step(traced: TracedModel, rule: Rule, *values: jax.Array) -> list[jax.Array]:
    """Run a step with a rule; its new States have variables of their own."""
    results = evaluate_inlined(traced.program.jaxpr, values, rule)
    taken = {id(value) for value in values}
    for place, leaf in enumerate(traced.written, len(traced.output_atoms)):
        value = results[place] if leaf.kind == "random" else strongly_typed(results[place])
        # A hidden state that equals an input, a constant or another state is copied: with its own
        # variable, changes to one do not affect the other.
        is_state = leaf.kind in ("hidden", "other")
        if is_state and (id(value) in taken or not is_tracer(value)):
            value = jnp.copy(value)
        taken.add(id(value))
        results[place] = value
    return results


def _mapped(
    step: Callable[..., list[jax.Array]], traced: TracedModel, batch_size: int
) -> ClosedJaxpr:
    """Trace a step that is vmapped over the batch; every sample has its own random key."""
    count = len(traced.argument_vars)
    is_key = [False] * count + [leaf.kind == "random" for leaf in traced.leaves]
    axes = [0] * count + [0 if _has_samples(leaf) else None for leaf in traced.leaves]

    def mapped(*values: jax.Array) -> list[jax.Array]:
        inputs = (
            jax.random.split(value, batch_size) if key else value
            for value, key in zip(values, is_key, strict=True)
        )
        results = list(jax.vmap(step, axes)(*inputs))
        for place, leaf in enumerate(traced.written, len(traced.output_atoms)):
            if leaf.kind == "random":
                results[place] = results[place][0]
        return results

    def batched(var: Var) -> Aval:
        return jax.ShapeDtypeStruct((batch_size, *var.aval.shape), var.aval.dtype)

    every = zip(traced.program.in_vars, axes, is_key, strict=True)
    return trace_to_jaxpr(
        mapped, [v.aval if axis is None or key else batched(v) for v, axis, key in every]
    )


def _has_samples(leaf: StateLeaf) -> bool:
    """Test whether a State of a vmapped model has a value for each sample."""
    is_written = leaf.out_var is not None
    if is_written and not leaf.per_sample and leaf.kind not in ("parameter", "random"):
        raise CompilationError(
            f"`update` writes State '{path_name(leaf.path)}', which has one value for all "
            "samples, but the model is mapped over the samples of a batch: each sample would "
            "write another value. Make it a `brainstate.ShortTermState`, one per sample, or "
            "write the model for a batch (`batch_size` without `vmap`)."
        )
    return leaf.per_sample or leaf.kind == "random"


def _rewriting(unroll_limit: int, shows_tangents: bool) -> Rule:
    """Return the rule that rewrites equations."""

    def rewrite(equation: Equation, operands: list[ArrayLike]) -> Sequence[ArrayLike] | None:
        name = equation.primitive.name
        if name == "custom_jvp_call" and shows_tangents and not _is_elementwise(equation):
            program = trace_to_jaxpr(_with_tangents(equation), [a.aval for a in equation.invars])
            return evaluate_inlined(program, operands, spell_out_broadcasts)
        if name not in ("cond", "scan", "while") or not holds_marked(equation):
            return spell_out_broadcasts(equation, operands)
        if name == "cond":
            return selected(equation, operands, rewrite)
        if name == "scan" and equation.params["length"] <= unroll_limit:
            return unrolled(equation, operands, rewrite)
        raise CompilationError(f"{_why_refused(equation, unroll_limit)} [{source_line(equation)}]")

    return rewrite


def _why_refused(equation: Equation, unroll_limit: int) -> str:
    if equation.primitive.name == "while":
        return (
            "A `while` loop contains an ETP operation. The number of its steps is unknown, so no "
            "trace is possible. Use `brainstate.transform.for_loop` with a fixed number of steps, "
            "or an ordinary operation."
        )
    return (
        f"A loop of {equation.params['length']} steps inside `update` contains an ETP operation; "
        f"loops are unrolled up to {unroll_limit} steps. Use a larger `unroll_limit`, or make the "
        "inner steps steps of the model."
    )


def _is_elementwise(equation: Equation) -> bool:
    """Test whether an equation with bodies has only elementwise operations in them."""
    return all(any(sub_jaxprs(e)) or _maps_elements(e) for e in equations_inside(equation))


def _sweeps(scan: Equation) -> bool:
    """Test whether a scan carries values from slice to slice, which couples the slices."""
    fixed, carried = scan_counts(scan)
    return carried > 0 and any(map(carries_derivative, scan.invars[fixed + carried :]))


def _maps_elements(equation: Equation) -> bool:
    size = equation.outvars[0].aval.size
    has_sizes = all(a.aval.size == size for a in equation.invars if carries_derivative(a))
    return has_sizes and equation.primitive.name in ELEMENTWISE | IN_ORDER | {"broadcast_in_dim"}


def _with_tangents(call: Equation) -> Callable[..., list[jax.Array]]:
    """Return a call with its own derivative as operations that have this derivative.

    Analyses see no elements in a call whose body is not its derivative. The result has the value of
    the call, and the derivative of its tangents at changes that are zero.
    """
    moved = [i for i, atom in enumerate(call.invars) if carries_derivative(atom)]

    def run(*operands: jax.Array) -> list[jax.Array]:
        held = [jax.lax.stop_gradient(operand) for operand in operands]

        def value(*changed: jax.Array) -> list[jax.Array]:
            every = dict(enumerate(held)) | dict(zip(moved, changed, strict=True))
            return bind(call, [*every.values()])

        changes = [operands[i] - held[i] for i in moved]
        values, tangents = jax.jvp(value, [held[i] for i in moved], changes)
        triples = zip(call.outvars, values, tangents, strict=True)
        return [with_derivative_of(v, t) if carries_derivative(var) else v for var, v, t in triples]

    return run


def spell_out_broadcasts(
    equation: Equation, operands: list[ArrayLike]
) -> Sequence[ArrayLike] | None:
    """Run an equation with explicit broadcasts; ``None`` to keep it as it is."""
    if equation.primitive.name == "dot_general":
        return _as_product(equation, operands)
    if equation.primitive.name not in ELEMENTWISE or len(equation.outvars) != 1:
        return None
    shape = equation.outvars[0].aval.shape
    if all(_fits(value, shape) for value in operands):
        return None
    full = [value if _fits(value, shape) else jnp.broadcast_to(value, shape) for value in operands]
    return bind(equation, full)


def _as_product(equation: Equation, operands: list[ArrayLike]) -> list[jax.Array] | None:
    """Run a ``dot_general`` as an elementwise product; ``None`` if it contains a sum."""
    (*letters, result), out = letters_of(equation), equation.outvars[0].aval
    full = []
    for names, value in zip(letters, operands, strict=True):
        summed = [axis for axis, a in enumerate(names) if a not in result]
        if any(jnp.shape(value)[axis] != 1 for axis in summed):
            return None
        kept = [names.index(a) for a in result if a in names]
        moved = jnp.transpose(value, [*kept, *summed])
        flat = jnp.reshape(moved, [jnp.shape(value)[axis] for axis in kept]).astype(out.dtype)
        places = [place for place, a in enumerate(result) if a in names]
        full.append(jax.lax.broadcast_in_dim(flat, out.shape, places))
    return [jax.lax.mul(*full)]


def _fits(value: ArrayLike, shape: tuple[int, ...]) -> bool:
    """Test whether an operand may stay: of the full shape, or a literal scalar."""
    return jnp.shape(value) == shape or (jnp.shape(value) == () and not is_tracer(value))


def selected(
    equation: Equation, operands: list[ArrayLike], rule: Rule | None = None
) -> list[jax.Array]:
    """Lower a branch: compute all its cases and select one."""
    index, *arguments = operands
    branches = equation.params["branches"]
    results = [evaluate_inlined(branch, arguments, rule) for branch in branches]
    which = jnp.clip(jnp.asarray(index, jnp.int32), 0, len(branches) - 1)
    return [
        jax.lax.select_n(jnp.broadcast_to(which, jnp.shape(cases[0])), *map(jnp.asarray, cases))
        for cases in zip(*results, strict=True)
    ]


def unrolled(
    equation: Equation, operands: list[ArrayLike], rule: Rule | None = None
) -> list[jax.Array]:
    """Unroll a scan of known length."""
    (fixed, carried, sequences), length = split_scan(equation, operands), equation.params["length"]
    body, results = equation.params["jaxpr"], list[list[jax.Array]]()
    order = range(length - 1, -1, -1) if equation.params["reverse"] else range(length)
    for step in order:
        slices = [sequence[step] for sequence in sequences]
        outputs = evaluate_inlined(body, [*fixed, *carried, *slices], rule)
        carried, stacked = outputs[: len(carried)], outputs[len(carried) :]
        results.append(stacked)
    if not results:
        avals = (var.aval for var in equation.outvars[len(carried) :])
        return [*carried, *(jnp.zeros(aval.shape, aval.dtype) for aval in avals)]
    in_order = results[::-1] if equation.params["reverse"] else results
    return [*carried, *(jnp.stack(column) for column in zip(*in_order, strict=True))]


def by_rules(program: Program, rules: Rules) -> Program:
    """Return a program with its equations run by rules."""
    avals = [var.aval for var in program.in_vars]
    return program_of(
        trace_to_jaxpr(lambda *values: evaluate_all(program.jaxpr, values, rules), avals)
    )


def with_program(traced: TracedModel, new: Program) -> TracedModel:
    """Replace the program of a model.

    The first inputs and outputs of the new program correspond to the old ones, in order.
    """
    arguments, outputs = len(traced.argument_vars), len(traced.output_atoms)
    before, after = iter(new.in_vars[arguments:]), iter(new.out_atoms[outputs:])
    leaves = tuple(
        dataclasses.replace(
            leaf, in_var=next(before), out_var=None if leaf.out_var is None else next(after)
        )
        for leaf in traced.leaves
    )
    return dataclasses.replace(
        traced,
        program=new,
        leaves=leaves,
        argument_vars=new.in_vars[:arguments],
        output_atoms=new.out_atoms[:outputs],
    )


def on_gradient_paths(traced: TracedModel) -> set[Var]:
    """Return the variables between parameters or hidden states and new hidden states."""
    program, hidden = traced.program, written(traced, "hidden")
    behind = program.ancestors(leaf.out_var for leaf in hidden if leaf.out_var is not None)
    return behind & program.descendants(s.in_var for s in (*hidden, *traced.parameters))


def with_loops_unrolled(traced: TracedModel, unroll_limit: int) -> TracedModel:
    """Unroll the loops that couple elements on the way to hidden states, or broadcast them.

    A loop is a single equation, and a walk truncates an operand of it as a whole. After unrolling,
    its steps are equations of the program (for example, small time steps of a cable with coupled
    compartments). Only the coupling is then truncated, and the path of each unit to itself is kept.
    """
    program = traced.program
    loops = [
        index
        for index in program.making(on_gradient_paths(traced))
        if (equation := program.equations[index]).primitive.name == "scan"
        and equation.params["length"] <= unroll_limit
        and (_sweeps(equation) or not _is_elementwise(equation))
    ]
    unroll = functools.partial(unrolled, rule=spell_out_broadcasts)
    rules = dict.fromkeys(loops, unroll)
    return with_program(traced, by_rules(program, rules)) if rules else traced
