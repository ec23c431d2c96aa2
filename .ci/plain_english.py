"""Count constructions that native technical English avoids, in pages, docstrings and comments.

Run it in the root of the repository; ``--list`` shows the places. It fails if pages, docstrings or
comments have more than one in 1,000 words. Code, inline code, mathematics and generated pages do
not count. A hit is a reason to read the sentence again, not an error.
"""

import ast
import io
import json
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator

LIMIT = 1.0
"""Constructions per 1,000 words."""

PATTERNS = {
    "headless 'that of', 'those of'": (
        r"\b(?:than|is|are|as|to|of|by|with|and|or|for|like|from|,) (?:that|those) of\b"
    ),
    "opens with What, Where, Who, Whose or Of": (
        r"(?:^|[.!?:] )(?:What|Where|Who|Whoever|Whose|Of) (?!\?)(?![^.?!]*\?)"  # questions may
    ),
    "of its own, by itself": (
        r"\b(?:of|by|on) (?:its|their|one's|your) own\b|\bby (?:itself|themselves)\b"
    ),
    "is no, are no": r"(?<![Tt]here )\b(?:is|are|was|were) no\b",  # "there is no" is plain
    "behind": r"\bbehind\b(?! the scenes)",
    "stand, stands": r"\bstands?\b(?! for)(?!ard)",
    "anew": r"\banew\b",
    "whoever, nobody, somebody": r"\b(?:[Ww]hoever|[Nn]obody|[Ss]omebody|[Ee]verybody)\b",
    "told, tells of": r"\btold\b|\btells? of\b",
    "go on, carry on": r"\bgo(?:es)? on\b|\bcarr(?:y|ies) on\b",
    "so many, as many": r"\bso many\b|(?<!times )\bas many\b(?! as)",  # "twice as many" is plain
    "beside": r"\bbeside\b",
    "looked at, looked into": r"\blooked (?:at|behind|into)\b",
}

ROOT_PAGES = ("README.md", "CONTRIBUTING.md")

Text = tuple[pathlib.Path, str]
"""A file, and a piece of its text."""


def prose(text: str) -> str:
    """Return Markdown or reStructuredText as one line, without code and mathematics."""
    text = re.sub(r"```.*?```|~~~.*?~~~|\$\$.*?\$\$|<!--.*?-->", " ", text, flags=re.S)
    text = re.sub(r"^\s*(>>>|\.\.\.|\|[-| :]+\||\.\. ).*$", " ", text, flags=re.M)
    text = re.sub(r"``[^`]*``|:math:`[^`]*`|`[^`]*`|\$[^$]*\$|\]\([^)]*\)", "X", text)
    return re.sub(r"\s*\n\s*", " ", text)


def pages() -> Iterator[Text]:
    """Yield the pages and notebooks of the site, and the pages in the root."""
    for path in [*pathlib.Path("docs").rglob("*.md"), *map(pathlib.Path, ROOT_PAGES)]:
        if not {"_build", "_generated", "generated"} & set(path.parts):
            yield path, path.read_text(encoding="utf-8")
    for path in [*pathlib.Path("docs").glob("*.ipynb"), *pathlib.Path("docs").glob("*/*.ipynb")]:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        markdown = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        yield path, "\n\n".join(markdown)


def docstrings() -> Iterator[Text]:
    """Yield the docstrings of the package, those of constants included."""
    for path in sorted(pathlib.Path("braintrace").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield path, text


def comments() -> Iterator[Text]:
    """Yield the comments of the package."""
    for path in sorted(pathlib.Path("braintrace").rglob("*.py")):
        for token in tokenize.generate_tokens(
            io.StringIO(path.read_text(encoding="utf-8")).readline
        ):
            if token.type == tokenize.COMMENT:
                yield path, token.string.lstrip("# ")


def main() -> bool:
    """Print the counts; return whether one of them is too large."""
    is_too_large = False
    kinds = {"pages": pages(), "docstrings": docstrings(), "comments": comments()}
    for kind, texts in kinds.items():
        words, found = 0, []
        for path, text in texts:
            line = prose(text)
            words += len(line.split())
            for name, pattern in PATTERNS.items():
                for match in re.finditer(pattern, line):
                    context = line[max(0, match.start() - 50) : match.end() + 40]
                    found.append(f"{path}: {name}: …{context}…")
        rate = 1000 * len(found) / max(words, 1)
        is_too_large |= rate > LIMIT
        print(f"{kind}: {rate:.2f} per 1,000 words of {words:,} (limit {LIMIT})")
        if "--list" in sys.argv or rate > LIMIT:
            print("\n".join(found))
    return is_too_large


if __name__ == "__main__":
    sys.exit(main())
