"""What the compiler leaves out is left out of nothing else, and is reported with its line.

A cell is a random program of elementwise operations, moves, mixings and marked operations. JAX has
its Jacobian; what of it the graph does not carry must be reported, and without reports the gradient
is that of backpropagation through time.
"""

import dataclasses
import inspect
import random

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from learners import TARGETS, XS, quietly_compiled, squared_error
from oracle import Plain
from paths import Request, by_chunks
from random_models import (
    BATCH,
    INPUTS,
    OUTPUTS,
    UNITS,
    Marked,
    Module,
    draw_widely,
    spike,
)

import braintrace

HALF, ROUNDING = UNITS // 2, 1e-12
DECAY = np.linspace(0.4, 0.7, UNITS)
ROTATION = np.linspace(-0.6, 0.6, UNITS * UNITS).reshape(UNITS, UNITS)

pytestmark = pytest.mark.usefixtures("float64")


# --- a grammar of cells ---------------------------------------------------------------------------


def small_steps(a, b):
    return jax.lax.scan(lambda c, _: (c + 0.1 * (jnp.tanh(b) - c), None), a, None, length=4)[0]


def pooled(a, b):
    pairs = jax.lax.reduce_window(a, 0.0, jax.lax.add, (1, 2), (1, 2), "VALID")
    return b + jnp.pad(pairs, ((0, 0), (0, HALF)))


ELEMENTWISE = {
    "tanh": lambda a, b: jnp.tanh(a),
    "add": lambda a, b: 0.6 * a + 0.5 * b,
    "gate": lambda a, b: jax.nn.sigmoid(a) * b,
    "select": lambda a, b: jnp.where(a > 0.1, a, 0.5 * b),
    "spike": lambda a, b: 0.3 * spike(a),
    "einsum": lambda a, b: jnp.einsum("bh,bh->bh", a, b),
    "loop": small_steps,
    "branch": lambda a, b: jax.lax.cond(a.sum() > 0, jnp.tanh, lambda a: 0.5 * a, a) + 0.1 * b,
}
MOVES = {
    "halves": lambda a, b: jnp.concatenate([a[:, :HALF], b[:, HALF:]], -1),
    "there and back": lambda a, b: (0.8 * a.T).reshape(2, HALF, BATCH).reshape(UNITS, BATCH).T,
    "stacked": lambda a, b: jnp.stack([a, b], -1).sum(-1),
    "padded": lambda a, b: jnp.pad(a[:, 1:], ((0, 0), (1, 0))),
    "rolled back": lambda a, b: jnp.roll(jnp.tanh(jnp.roll(a, 1, -1)), -1, -1),
    "stopped": lambda a, b: jax.lax.stop_gradient(a) + 0.5 * b,
}
MIXING = {
    "roll": lambda a, b: jnp.roll(a, 1, axis=-1),
    "flip": lambda a, b: a[:, ::-1],
    "mirror": lambda a, b: 0.6 * b - 0.4 * jnp.flip(a, -1),
    "shift": lambda a, b: b.at[:, 1:].add(0.3 * a[:, :-1]),
    "swap": lambda a, b: jnp.concatenate([a[:, HALF:], a[:, :HALF]], -1),
    "mean": lambda a, b: b - a.mean(-1, keepdims=True),
    "dot": lambda a, b: 0.5 * a @ jnp.asarray(ROTATION, a.dtype),
    "over samples": lambda a, b: b + 0.1 * a.sum(0, keepdims=True),
    "max": lambda a, b: a - a.max(-1, keepdims=True),
    "running sum": lambda a, b: 0.4 * jnp.cumsum(a, -1),
    "pooled": pooled,
}
ALONE = {**ELEMENTWISE, **MOVES, **MIXING}
MARKED = ("input", "recurrent", "gain", "shared gain", "fused", "column")
SHAPES = {
    "input": (INPUTS, UNITS),
    "recurrent": (UNITS, UNITS),
    "gain": (UNITS,),
    "shared gain": (1,),
    "fused": (INPUTS, 2 * UNITS),
    "column": (INPUTS, 1),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """Instructions on a stack that starts with old states and a drive: (name, place of a, of b)."""

    states: int
    instructions: tuple[tuple[str, int, int], ...]

    @property
    def names(self):
        return [f"h{i}" for i in range(self.states)]

    def params(self, dtype=np.float64):
        rng = np.random.default_rng(11)
        shapes = {"first": SHAPES["input"], "out": (UNITS, OUTPUTS)}
        for number, (name, _, _) in enumerate(self.instructions):
            if name in SHAPES:
                shapes[f"w{number}"] = SHAPES[name]
        drawn = {k: rng.normal(size=s) / np.sqrt(s[0]) for k, s in shapes.items()}
        return {k: jnp.asarray(v, dtype) for k, v in drawn.items()}

    def start(self, batch=BATCH, dtype=np.float64):
        values = np.linspace(-0.4, 0.5, batch * UNITS).reshape(batch, UNITS)
        return {name: jnp.asarray(values + 0.1 * i, dtype) for i, name in enumerate(self.names)}

    def step(self, ops, p, h, x):
        drive = ops.matmul(x, p["first"])
        stack = [*h.values(), drive]
        for number, (name, i, j) in enumerate(self.instructions):
            a, b = stack[-1 - i % len(stack)], stack[-1 - j % len(stack)]
            if name in ALONE:
                stack.append(ALONE[name](a, b))
            else:
                stack.append(self.marked(ops, name, p[f"w{number}"], x, a, b))
        new = {
            name: DECAY * h[name] + 0.4 * jnp.tanh(stack[-1 - i]) + 0.2 * drive
            for i, name in enumerate(self.names)
        }
        return new, sum(new.values()) @ p["out"]

    def marked(self, ops, name, w, x, a, b):
        if name in ("gain", "shared gain"):
            return ops.element_wise(w, jnp.tanh) * a
        y = ops.matmul(a if name == "recurrent" else x, w)
        if name == "fused":
            return jax.nn.sigmoid(y[:, :UNITS]) * a + y[:, UNITS:]
        return y * a + b if name == "column" else y + 0.3 * a


def draw_cell(rng):
    """Half of the cells have no instruction that couples elements."""
    kinds = [*ELEMENTWISE, *MOVES, *MARKED, *rng.choice([[], MIXING])]
    count = rng.randint(3, 8)
    drawn = [(rng.choice(kinds), rng.randrange(10), rng.randrange(10)) for _ in range(count)]
    return Cell(rng.randint(1, 3), tuple(drawn))


def cells(count):
    def features(cell):
        return {name: True for name, _, _ in cell.instructions} | {"states": cell.states}

    return draw_widely(random.Random(2), draw_cell, features, count)


def compiled(cell, **options):
    model = Module(cell, Marked(), np.float64)
    return quietly_compiled(model, "d_rtrl", XS[0], batch_size=BATCH, **options)


# --- what the graph carries, and what it reports --------------------------------------------------

CUTS, LOSSES = {"truncated"}, {"no-trace"}


def jacobian_of(cell):
    """{(new state, old state): which elements depend on which}, at points of a trajectory."""
    params, states, found = cell.params(), cell.start(), {}
    moved = np.random.default_rng(4)

    def new(h, x):
        return cell.step(Plain(), params, h, x)[0]

    for x in XS[:3]:
        point = {k: v + 0.1 * moved.normal(size=v.shape) for k, v in states.items()}
        for a, row in jax.jacrev(new)(point, x).items():
            for c, block in row.items():
                depends = np.abs(np.reshape(block, (BATCH * UNITS, -1))) > ROUNDING
                found[a, c] = found.get((a, c), False) | depends
        states = new(states, x)
    return found


def carried_by(graph):
    """The same of what traces carry, and the states of which only outputs of the step are read."""
    carried, grouped, outputs = {}, set(), set()
    for group in graph.hidden_groups:
        places = [
            np.arange(BATCH * UNITS) if layout is None else np.ravel(layout)
            for layout in group.old_layouts
        ]
        names = [state.name for state in group.states]
        grouped |= {*names}
        outputs |= {names[a] for a in group.downstream}
        for a, c in group.transition:
            carried[names[a], names[c]] = places[a][:, None] == places[c]
    return carried, grouped, outputs


def is_reported(graph, kinds, *names):
    return any(d.kind in kinds and {*names} <= {*d.paths} for d in graph.diagnostics)


CELLS = cells(24)


@pytest.mark.parametrize("number", range(len(CELLS)))
def test_what_is_not_carried_is_zero_or_reported(number):
    cell = CELLS[number]
    try:
        graph = compiled(cell).graph
    except braintrace.CompilationError:
        assert {name for name, *_ in cell.instructions} & {*MIXING}, str(cell)
        return  # no weight reaches a state elementwise
    carried, grouped, outputs = carried_by(graph)
    for (a, c), depends in jacobian_of(cell).items():
        assert not depends.any() or {a, c} <= grouped, f"{c} -> {a}, in no group: {cell}"
        rest = depends & ~carried.get((a, c), np.zeros_like(depends))
        if rest.any() and a not in outputs:
            assert is_reported(graph, CUTS, c, a), f"{c} -> {a} without a word: {cell}"


def is_exact(graph):
    """Whether a graph reports nothing that is left out."""
    return not any(d.kind in CUTS | LOSSES and d.paths != ("out",) for d in graph.diagnostics)


def gradient(learner):
    steps, batch = XS.shape[:2]
    asked = Request(XS, TARGETS, np.ones(steps), np.zeros((steps, batch), bool))
    return by_chunks(learner, asked, squared_error)


def expected(cell, rule):
    def loss(t, y):
        return squared_error(y, jnp.asarray(TARGETS)[t])

    return oracle.gradient_by_rule(cell, rule, cell.params(), XS, loss)


EXACT = [cell for cell in cells(40) if not {n for n, *_ in cell.instructions} & {*MIXING}][:8]


@pytest.mark.parametrize("number", range(len(EXACT)))
def test_without_a_report_the_gradient_is_that_of_bptt(number):
    cell = EXACT[number]
    learner = compiled(cell)
    if is_exact(learner.graph):
        oracle.assert_close(gradient(learner), expected(cell, "bptt"), 1e-9, str(cell))
    else:
        names = {name for name, *_ in cell.instructions}
        assert names & {"recurrent", "padded", "halves", "fused", "column"}, str(cell)


# --- each mixing by itself ------------------------------------------------------------------------


def lines_of(function):
    """The places that a report of an operation in this function may name."""
    lines, first = inspect.getsourcelines(function)
    return [f"test_soundness.py:{first + i}:" for i in range(len(lines))]


@pytest.mark.parametrize("name", MIXING)
def test_a_cut_is_reported_with_state_operation_and_line(name):
    """A state that an ordinary operation couples: a warning, and an error with `strict`."""
    cell = Cell(1, ((name, 1, 0),))  # of the state; its other operand is the drive
    cuts = [d for d in compiled(cell).graph.diagnostics if d.kind in CUTS]
    assert cuts
    for cut in cuts:
        assert cut.level == "warning"
        assert {*cut.paths} == {"h0"}
        assert any(line in cut.source for line in lines_of(MIXING[name]))
    with pytest.raises(braintrace.CompilationError, match="h0"):
        compiled(cell, strict=True)
