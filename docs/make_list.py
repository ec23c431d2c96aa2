"""Write the list of pages in `docs/README.md` from the contents of the site in `docs/index.md`.

python docs/make_list.py
"""

import json
import pathlib
import re

DOCS = pathlib.Path(__file__).parent
BEGIN, END = "<!-- pages -->\n", "<!-- /pages -->\n"
CONTENTS = re.compile(r"^```{toctree}\n:caption: (.+?)\n.*?\n\n(.*?)^```", re.MULTILINE | re.DOTALL)


def link(name):
    """Return the line of a page."""
    (path,) = DOCS.glob(f"{name}.[mri]*")  # Markdown, reStructuredText or a notebook
    text = path.read_text().removeprefix("---\nnosearch: true\n---\n")
    if path.suffix == ".ipynb":
        text = "".join(json.loads(text)["cells"][0]["source"])
    if included := re.match(r"```{include} (.+)", text):
        text = (DOCS / included[1]).read_text()
    title = re.search(r"^# (.+)|^\w.+", text, re.MULTILINE)
    return f"- [{title[1] or title[0]}]({path.relative_to(DOCS)})\n"


def render():
    """Return the page with the current list."""
    found = CONTENTS.findall((DOCS / "index.md").read_text())
    parts = [f"**{caption}**\n\n{''.join(map(link, names.split()))}\n" for caption, names in found]
    before, _, rest = (DOCS / "README.md").read_text().partition(BEGIN)
    return before + BEGIN + "\n" + "".join(parts) + END + rest.partition(END)[2]


if __name__ == "__main__":
    (DOCS / "README.md").write_text(render())
