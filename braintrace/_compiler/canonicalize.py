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
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
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
    is_var,
    scan_counts,
    source_line,
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

RuleOf: TypeAlias = Callable[[Equation], Rule | None]


LONGEST_UNROLLED = 32
"""Most steps of a loop that is unrolled: the program grows with each of them."""


def rewritten(traced: TracedModel, is_elementwise: bool) -> TracedModel:
    """Return a step in the form that the analyses read, for all samples.

    Parameters
    ----------
    traced
        The step.
    is_elementwise
        Whether custom derivatives and loops that couple elements become programs. Rules that follow
        the whole state need no elements, and compile the shorter program.
    """
    rules = _rules_of(traced, _rewriting(is_elementwise))
    if traced.batch_size is not None:
        # Vmapping adds broadcasts.
        mapped = inlined(_mapped(traced, traced.batch_size, rules), spell_out_broadcasts)
        traced = with_program(traced, program_of(mapped))
    elif rules:
        traced = with_program(traced, by_rules(traced.program, rules))
    # The loops are those of the result: vmapping, branches and derivatives change and add some.
    if is_elementwise and (loops := _rules_of(traced, _unrolling(traced))):
        traced = with_program(traced, by_rules(traced.program, loops))
    return traced


def _rules_of(traced: TracedModel, rule_of: RuleOf) -> dict[int, Rule]:
    every = ((i, rule_of(equation)) for i, equation in enumerate(traced.program.equations))
    return {index: rule for index, rule in every if rule is not None}


def _mapped(traced: TracedModel, batch_size: int, rules: Rules) -> ClosedJaxpr:
    """Trace a step that is vmapped over the batch; every sample has its own random key."""
    count = len(traced.argument_vars)
    is_key = [False] * count + [leaf.kind == "random" for leaf in traced.leaves]
    axes = [0] * count + [0 if _has_samples(leaf) else None for leaf in traced.leaves]

    def step(*values: jax.Array) -> list[ArrayLike]:
        return evaluate_all(traced.program.jaxpr, values, rules)

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


def _rewriting(is_elementwise: bool) -> RuleOf:
    """Return a function that returns the rule for an equation; ``None``: it stays as it is."""

    def rewrite(equation: Equation, operands: list[ArrayLike]) -> Sequence[ArrayLike] | None:
        rule = rule_of(equation)
        return None if rule is None else rule(equation, operands)

    def rule_of(equation: Equation) -> Rule | None:
        name = equation.primitive.name
        if name == "custom_jvp_call" and is_elementwise and not _is_elementwise(equation):
            return _show_tangents
        if name not in ("cond", "scan", "while"):
            return spell_out_broadcasts if _broadcasts(equation) else None
        if not holds_marked(equation):
            return None
        if name != "cond" and not _is_short(equation):
            raise CompilationError(f"{_why_refused(equation)} [{source_line(equation)}]")
        return functools.partial(selected if name == "cond" else unrolled, rule=rewrite)

    return rule_of


def _unrolling(traced: TracedModel) -> RuleOf:
    """Return a function that returns the rule for a loop that couples elements of hidden states.

    A walk truncates an operand of a loop as a whole. Of the steps of a loop, it truncates the
    coupling alone (of the compartments of a cable), and follows each unit to itself.
    """
    paths = on_gradient_paths(traced, "hidden", "other")
    off_paths = traced.program.producer.keys() - paths

    def rule_of(loop: Equation) -> Rule | None:
        is_followed = _is_short(loop) and not off_paths.issuperset(loop.outvars)
        if is_followed and (not _is_elementwise(loop) or _sweeps(loop)):
            return functools.partial(unrolled, rule=spell_out_broadcasts)
        return None

    return rule_of


def _is_short(loop: Equation) -> bool:
    return loop.primitive.name == "scan" and loop.params["length"] <= LONGEST_UNROLLED


def _why_refused(equation: Equation) -> str:
    if equation.primitive.name == "while":
        return (
            "A `while` loop contains an ETP operation. The number of its steps is unknown, so no "
            "trace is possible. Use `brainstate.transform.for_loop` with a fixed number of steps, "
            "or an ordinary operation."
        )
    return (
        f"A loop of {equation.params['length']} steps inside `update` contains an ETP operation; "
        f"loops are unrolled up to {LONGEST_UNROLLED} steps. Make the inner steps steps of the "
        "model, or split the loop into shorter ones."
    )


def _is_elementwise(equation: Equation) -> bool:
    """Test whether an equation with bodies has only elementwise operations in them."""
    return all(any(sub_jaxprs(e)) or _maps_elements(e) for e in equations_inside(equation))


def _sweeps(scan: Equation) -> bool:
    """Test whether a scan carries values from slice to slice, which couples the slices."""
    fixed, carried = scan_counts(scan)
    return carried > 0 and any(map(carries_derivative, scan.invars[fixed + carried :]))


def _maps_elements(equation: Equation) -> bool:
    if equation.primitive.name not in ELEMENTWISE | IN_ORDER | {"broadcast_in_dim"}:
        return False
    size = equation.outvars[0].aval.size
    return all(a.aval.size == size for a in equation.invars if carries_derivative(a))


def _show_tangents(call: Equation, operands: list[ArrayLike]) -> list[ArrayLike]:
    """Run a call with its own derivative as operations that have this derivative.

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

    program = trace_to_jaxpr(run, [atom.aval for atom in call.invars])
    return evaluate_inlined(program, operands, spell_out_broadcasts)


def _broadcasts(equation: Equation) -> bool:
    """Test whether an equation of elements broadcasts its operands; a literal may be a scalar."""
    if equation.primitive.name == "dot_general":  # without a sum, it is a product of elements
        summed = equation.params["dimension_numbers"][0][0]
        return all(equation.invars[0].aval.shape[axis] == 1 for axis in summed)
    if equation.primitive.name not in ELEMENTWISE or len(equation.outvars) != 1:
        return False
    shape = equation.outvars[0].aval.shape
    return any(is_var(atom) and atom.aval.shape != shape for atom in equation.invars)


def spell_out_broadcasts(
    equation: Equation, operands: list[ArrayLike]
) -> Sequence[ArrayLike] | None:
    """Run an equation with explicit broadcasts; ``None`` to keep it as it is."""
    if not _broadcasts(equation):
        return None
    if equation.primitive.name == "dot_general":
        return _as_product(equation, operands)
    shape, pairs = equation.outvars[0].aval.shape, zip(equation.invars, operands, strict=True)
    full = [jnp.broadcast_to(v, shape) if is_var(atom) else v for atom, v in pairs]
    return bind(equation, full)


def _as_product(equation: Equation, operands: list[ArrayLike]) -> list[jax.Array]:
    """Run a ``dot_general`` without a sum as an elementwise product."""
    (*letters, result), out = letters_of(equation), equation.outvars[0].aval
    full = []
    for names, value in zip(letters, operands, strict=True):
        kept = [names.index(a) for a in result if a in names]
        summed = [axis for axis in range(len(names)) if axis not in kept]
        moved = jnp.transpose(value, [*kept, *summed])
        flat = jnp.reshape(moved, [jnp.shape(value)[axis] for axis in kept]).astype(out.dtype)
        places = [place for place, a in enumerate(result) if a in names]
        full.append(jax.lax.broadcast_in_dim(flat, out.shape, places))
    return [jax.lax.mul(*full)]


def selected(
    equation: Equation, operands: list[ArrayLike], rule: Rule | None = None
) -> list[jax.Array]:
    """Lower a branch: compute all its cases and select one."""
    index, *arguments = operands
    branches = equation.params["branches"]
    results = [evaluate_inlined(branch, arguments, rule) for branch in branches]
    which = jax.lax.clamp(np.int32(0), jnp.asarray(index, jnp.int32), np.int32(len(branches) - 1))
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


def on_gradient_paths(traced: TracedModel, *kinds: str) -> set[Var]:
    """Return the variables between parameters or States of some kinds and new States of them."""
    program, states = traced.program, [s for kind in kinds for s in written(traced, kind)]
    behind = program.ancestors(s.out_var for s in states if s.out_var is not None)
    return behind & program.descendants(s.in_var for s in (*states, *traced.parameters))
