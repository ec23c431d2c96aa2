"""The pages of the evidence, written from the records: the same records give the same bytes.

`write` draws the plots and writes the pages of ``docs/_generated``. A test compares them with the
stored records.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from . import details, figures, front, literature, record, study, wide, words
from .findings import Findings, Run, sort
from .tasks import ALL as TASKS

DOCS = Path(__file__).parent.parent.parent / "docs"
GENERATED = "_generated"
"""Folder of the pages in the documentation."""


def write(folder: Path = record.FOLDER, docs: Path | None = None) -> list[Path]:
    """Write the pages and their plots; return what was written.

    Parameters
    ----------
    folder
        Of the records.
    docs
        Where the pages go: to the documentation if the records are those that are stored with it,
        next to the records otherwise.

    Raises
    ------
    MissingPackageError
        Without matplotlib; the message names the extra that brings it.
    ValueError
        If there are no records.
    """
    findings = load(folder)
    if not findings.runs:
        raise ValueError(f"There are no records in {folder}: run `python -m benchmarks learning`.")
    docs = docs or (DOCS if folder == record.FOLDER else folder)
    studies = study.load(folder)
    (docs / GENERATED).mkdir(exist_ok=True)
    pages = render(findings, studies)
    texts = {docs / GENERATED / name: text for name, text in pages.items()}
    for path, text in texts.items():
        path.write_text(text)
    return [*texts, *draw(findings, studies, docs / words.PICTURES)]


def load(folder: Path = record.FOLDER) -> Findings:
    """Return all runs of a folder in the order of the page."""
    return sort(record.read_all(folder), (TASKS, tuple(words.CELLS), tuple(words.WAYS)))


def render(findings: Findings, studies: Sequence[study.Study] = ()) -> dict[str, str]:
    """Return the pages by the names of their files."""
    pages = {
        "evidence.md": front.render(findings, studies),
        "evidence_details.md": details.render(findings),
        "evidence_wide.md": wide.render(findings),
        "evidence_literature.md": literature.render(findings),
    }
    if studies:
        pages["online_updates.md"] = study.page(list(studies))
    return {
        name: re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"
        for name, lines in pages.items()
    }


def draw(findings: Findings, studies: list[study.Study], folder: Path) -> list[Path]:
    """Draw all plots that there are records for."""
    core = findings.of("core")
    drawn: dict[str, Callable[[Path], None]] = {}
    if core.runs:
        drawn = {
            "learning": lambda path: figures.over_training(core, path, _curve, "score"),
            "cosine": lambda path: figures.over_training(core, path, _cosine, "cosine to BPTT"),
            "price": lambda path: figures.scores_against_price(core, path),
        }
    if findings.of("wide").runs:
        drawn["tasks"] = lambda path: figures.kept_by_task(wide.runs_of(findings), path)
    if core.complete().runs:
        drawn["pareto"] = lambda path: figures.pareto(core.complete(), path)
    if studies:
        drawn["online_updates"] = lambda path: figures.online_updates(studies, path)
    paths = {name: folder / f"{name}.png" for name in drawn}
    for name, path in paths.items():
        drawn[name](path)
    return list(paths.values())


def _curve(run: Run) -> list[tuple[int, float]]:
    return run.curve


def _cosine(run: Run) -> list[tuple[int, float]]:
    return run.cosine
