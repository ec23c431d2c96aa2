"""The format of names, scores, ratios and sizes on the pages."""

from ..markdown import DASH, seconds
from .findings import Run

WAYS = {
    "bptt": "BPTT",
    "tbptt-long": "BPTT in long windows",
    "tbptt-short": "BPTT in short windows",
    "rtrl": "`RTRL`",
    "ostl-recurrent": "`OSTLRecurrent`",
    "snap-1": "`SnAp`",
    "d_rtrl": "`D_RTRL`",
    "eprop": "`EProp`",
    "ostl-feedforward": "`OSTLFeedforward`",
    "bptt-feedback": "BPTT (random feedback)",
    "d_rtrl-feedback": "`D_RTRL` (random feedback)",
    "rflo": "`RFLO` (random feedback)",
    "es_d_rtrl": "`ES_D_RTRL`",
    "ottt": "`OTTT`",
    "kf_rtrl": "`KF_RTRL`",
    "uoro": "`UORO`",
    "immediate": "`Immediate`",
}
CELLS = {
    "leaky": "leaky tanh",
    "gru": "GRU",
    "lstm": "LSTM",
    "indrnn": "IndRNN",
    "lru": "LRU",
    "rtu": "RTU",
    "alif": "recurrent ALIF",
}
REFUSED, MISSING, NEVER = "refused", DASH, "never"
EDGES = {-1: " ▾", 0: "", 1: " ▴"}
"""Mark of a score whose learning rate is the lowest or the highest of the grid."""

PICTURES = "_static/evidence"


def way(name: str) -> str:
    """Return how a way is called, with its optimizer where this is not Adam."""
    base = name.removesuffix("-rmsprop")
    return WAYS.get(base, f"`{base}`") + (", RMSprop" if base != name else "")


def cell(name: str) -> str:
    """Return how a cell is called."""
    return CELLS.get(name, name)


def pair(task: str, cell_name: str) -> str:
    """Return how a task and a cell are called together."""
    return f"{task}, {cell(cell_name)}"


def counted(number: int, noun: str) -> str:
    """Return how many there are of something."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def picture(name: str, described: str) -> list[str]:
    """Return the lines that show a plot."""
    return [
        f"```{{image}} ../{PICTURES}/{name}.png",
        f":alt: {described}",
        ":class: picture",
        "```",
        "",
    ]


def plain(text: str) -> str:
    """Return a text without marks of Markdown, for a plot."""
    return text.replace("`", "")


def digits(value: float | None) -> str:
    """Return a score, cosine or ratio with two digits after the point."""
    if value is None:
        return MISSING
    text = f"{value:.2f}"
    return "0.00" if text == "-0.00" else text


def score(run: Run | None) -> str:
    """Return mean and spread over seeds, every lane and seed that was lost, and an edge."""
    if run is None:
        return MISSING
    if not run.ran:
        return REFUSED
    lanes = len(run.record.failed)
    if run.mean is None:
        return "**diverged**"
    text = f"{digits(run.mean)} ± {digits(run.spread)}"
    if run.lost:
        text += f" (**{run.lost} of {len(run.record.settings.seeds)} diverged**)"
    return text + (f" ✗{lanes}" if lanes else "") + EDGES[run.at_edge]


def to_threshold(run: Run | None) -> str:
    """Return the mean number of updates, and how many seeds it is about if not all."""
    if run is None:
        return MISSING
    if not run.ran:
        return REFUSED
    found, seeds = run.at_threshold, len(run.record.settings.seeds)
    if not found:
        return NEVER
    text = f"{sum(found) / len(found):.0f}"
    return text if len(found) == seeds else f"{text} ({len(found)} of {seeds})"


def size(value: float | None) -> str:
    """Return a number of bytes."""
    if value is None:
        return MISSING
    for unit, factor in (("MB", 1e6), ("kB", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} B"


def traces(value: float | None) -> str:
    """Return a number of bytes; rules that store nothing have no traces."""
    return size(value or None)


def times(value: float | None) -> str:
    """Return a ratio."""
    if value is None:
        return MISSING
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def between(values: list[float]) -> str:
    """Return the range of some ratios."""
    low, high = times(min(values)), times(max(values))
    return low if low == high else f"{low} to {high}"


def with_ratio(text: str, ratio: float | None) -> str:
    """Return a number with its ratio to the reference in brackets."""
    return text if ratio is None else f"{text} ({times(ratio)})"


def duration(value: float | None) -> str:
    """Return a time with its unit."""
    return seconds(value)


def listed(names: list[str]) -> str:
    """Return names as a sentence has them."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"
