"""Names of methods and cells, and the format of numbers in tables."""

import dataclasses
from collections.abc import Sequence

from .results import Gains, Results

METHODS = {
    "bptt": ("BPTT", "black", "s"),
    "tbptt-long": ("BPTT in long windows", "dimgray", "D"),
    "tbptt-short": ("BPTT in short windows", "darkgray", "d"),
    "rtrl": ("`RTRL`", "tab:blue", "o"),
    "ostl-recurrent": ("`OSTLRecurrent`", "cornflowerblue", "^"),
    "snap-1": ("`SnAp`", "tab:cyan", "<"),
    "d_rtrl": ("`D_RTRL`", "tab:red", "o"),
    "d_rtrl-long": ("`D_RTRL` in long windows", "firebrick", "D"),
    "d_rtrl-short": ("`D_RTRL` in short windows", "firebrick", "d"),
    "eprop": ("`EProp`", "lightcoral", "+"),
    "ostl-feedforward": ("`OSTLFeedforward`", "darkred", "1"),
    "bptt-feedback": ("BPTT (random feedback)", "black", "x"),
    "d_rtrl-feedback": ("`D_RTRL` (random feedback)", "tab:red", "x"),
    "rflo": ("`RFLO` (random feedback)", "deeppink", "x"),
    "es_d_rtrl": ("`ES_D_RTRL`", "tab:orange", "o"),
    "es_d_rtrl-long": ("`ES_D_RTRL` in long windows", "peru", "D"),
    "es_d_rtrl-short": ("`ES_D_RTRL` in short windows", "peru", "d"),
    "ottt": ("`OTTT`", "gold", "P"),
    "kf_rtrl": ("`KF_RTRL`", "tab:green", "*"),
    "uoro": ("`UORO`", "yellowgreen", "*"),
    "immediate": ("`Immediate`", "tab:purple", "X"),
}
"""Title, colour and marker: exact methods are blue, methods of one family have one colour."""

CELLS = {
    "leaky": "leaky tanh",
    "gru": "GRU",
    "lstm": "LSTM",
    "indrnn": "IndRNN",
    "lru": "LRU",
    "rtu": "RTU",
    "alif": "recurrent ALIF",
}
MISSING = "–"


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text that a notebook shows as a table."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        lines = [f"| {' | '.join(row)} |" for row in (self.head, *self.rows)]
        return "\n".join([lines[0], f"|{'---|' * len(self.head)}", *lines[1:]])

    _repr_markdown_ = __str__


def scores(results: Results) -> Table:
    """Return the mean score of each run, with its standard error over several seeds."""
    lines = []
    for run in results.runs:
        first = run.first
        score = digits(run.mean) if run.ran else "refused"
        if len(run.rows) > 1:
            score += f" ± {digits(run.error)}"
        bounds = digits(first.chance), digits(first.threshold)
        lines.append([first.task, cell(first.cell), method(first.method), score, *bounds])
    return Table(["task", "cell", "method", "score", "chance", "threshold"], lines)


def method(name: str) -> str:
    base = name.removesuffix("-rmsprop")
    return METHODS[base][0] + (", RMSprop" if base != name else "")


def cell(name: str) -> str:
    return CELLS.get(name, name)


def pair(task: str, cell_name: str) -> str:
    return f"{task}, {cell(cell_name)}"


def digits(value: float | None) -> str:
    """Return a score, cosine or ratio with two digits after the point."""
    if value is None:
        return MISSING
    text = f"{value:.2f}"
    return "0.00" if text == "-0.00" else text


def answers(values: Sequence[bool | None]) -> str:
    """Return how often the answer is yes, undecided and no."""
    return "/".join(str(values.count(value)) for value in (True, None, False))


def seeds(counts: Sequence[int]) -> str:
    """Return the number of pairs, and the seeds of each."""
    low, high = min(counts), max(counts)
    return f"{len(counts)} × {low}" if low == high else f"{len(counts)} × {low} to {high}"


def worst(gains: Gains) -> str:
    """Return the lowest relative gain with its task and cell."""
    if not gains.parts:
        return MISSING
    part, task, cell_name = gains.parts[0]
    return f"{digits(part)} ({pair(task, cell_name)})"


def size(value: float | None) -> str:
    if value is None:
        return MISSING
    sizes = {"MB": 1e6, "kB": 1e3, "B": 1.0}
    unit = next((unit for unit, size in sizes.items() if value >= size), "B")
    return f"{value / sizes[unit]:.3g} {unit}"


def times(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"
