"""Position ids through branches and loops that hold no marked operation.

Such equations stay whole. Their bodies are walked: every branch of a ``cond``, and the body of
a ``scan`` or ``while`` step by step, until the ids of what is carried no longer change.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from ..._jax import Equation, is_var
from ..._jaxpr import loop_of
from ..._jaxpr.dataflow import LONGEST_WALK, NONE
from .analysis import Analysis
from .transfer import CUT, Contribution, Ids, join

WalkBody: TypeAlias = Callable[[Analysis, Sequence[Ids | None]], list[Contribution]]
"""Carries ids back through a body: ``(what is known of it, output ids) -> input contributions``."""


def through_cond(
    analysis: Analysis, equation: Equation, out_ids: Sequence[Ids | None], walk_body: WalkBody
) -> list[Contribution]:
    """Merge what the operands receive in each branch."""
    found: list[Contribution] = [None] * (len(equation.invars) - 1)
    for branch in equation.params["branches"]:
        received = walk_body(analysis.body(branch), out_ids)
        found = [join(a, b) for a, b in zip(found, received, strict=True)]
    return [None, *found]


def through_while(
    analysis: Analysis, equation: Equation, out_ids: Sequence[Ids | None], walk_body: WalkBody
) -> list[Contribution]:
    """Carry ids around the loop until they no longer change."""
    loop = loop_of(equation, equation.invars)
    constants = len(loop.fixed)
    body = _Body(analysis.body(loop.body), walk_body)
    carried: list[Contribution] = list(out_ids)
    while True:
        received = body.walk(carried)
        after = [join(a, b) for a, b in zip(carried, received[constants:], strict=True)]
        if _same(after, carried):
            return [*[None] * len(loop.tested), *received[:constants], *carried]
        carried = after


def through_scan(
    analysis: Analysis, equation: Equation, out_ids: Sequence[Ids | None], walk_body: WalkBody
) -> list[Contribution]:
    """Carry ids back over the steps of a scan."""
    loop, length = loop_of(equation, equation.invars), equation.params["length"]
    constants, carries = len(loop.fixed), len(loop.carried)
    body = _Body(analysis.body(loop.body), walk_body)
    carried: list[Contribution] = list(out_ids[:carries])
    stacked = out_ids[carries:]
    fixed: list[Contribution] = [None] * constants
    slices: list[list[Contribution]] = []
    if any(ids is not None for ids in stacked) and length > LONGEST_WALK:
        return [CUT] * len(equation.invars)
    backward = range(length) if equation.params["reverse"] else range(length - 1, -1, -1)
    for step in backward:
        results = [None if ids is None else ids[step] for ids in stacked]
        received = body.walk([*carried, *results])
        fixed = [join(a, b) for a, b in zip(fixed, received[:constants], strict=True)]
        before = received[constants : constants + carries]
        slices.append(received[constants + carries :])
        if all(ids is None for ids in stacked) and _same(before, carried):
            break
        carried = before
    if not slices:  # a loop of no steps: what is carried passes through
        return [*fixed, *carried, *[None] * len(loop.sequences)]
    slices += [slices[-1]] * (length - len(slices))
    in_order = slices if equation.params["reverse"] else slices[::-1]
    return [*fixed, *carried, *(_stack(list(column)) for column in zip(*in_order, strict=True))]


class _Body:
    """A loop body; an output that is cut makes everything that it depends on cut."""

    def __init__(self, analysis: Analysis, walk_body: WalkBody) -> None:
        self._analysis = analysis
        self._walk_body = walk_body

    def walk(self, outputs: Sequence[Contribution]) -> list[Contribution]:
        program = self._analysis.program
        ids = [value if isinstance(value, np.ndarray) else None for value in outputs]
        cut = [
            atom
            for atom, value in zip(program.out_atoms, outputs, strict=True)
            if value is CUT and is_var(atom)
        ]
        tainted = program.depends_on(cut)
        received = self._walk_body(self._analysis, ids)
        return [
            CUT if var in tainted else value
            for var, value in zip(program.in_vars, received, strict=True)
        ]


def _same(first: Sequence[Contribution], second: Sequence[Contribution]) -> bool:
    return all(
        a is b or (isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b))
        for a, b in zip(first, second, strict=True)
    )


def _stack(column: list[Contribution]) -> Contribution:
    if any(value is CUT for value in column):
        return CUT
    known = [value for value in column if isinstance(value, np.ndarray)]
    if not known:
        return None
    empty = np.full(known[0].shape, NONE, np.int32)
    return np.stack([value if isinstance(value, np.ndarray) else empty for value in column])
