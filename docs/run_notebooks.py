"""Execute the notebooks, each from a clean kernel; fail when one raises or takes too long.

    python docs/run_notebooks.py                    # all, and leave the files as they are
    python docs/run_notebooks.py --write            # all, and store the outputs
    python docs/run_notebooks.py --write delays     # those whose name contains one of the words

A cell that writes to standard error (a warning) counts as one that raises: a reader would see it.
"""

import argparse
import os
import pathlib
import re
import sys
import time

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

DOCS = pathlib.Path(__file__).parent
NOTEBOOKS = sorted(DOCS.glob("notebooks/*.ipynb"))
LIMIT = 300  # seconds for one notebook, on two cores
SHOWN = ("tags", "mystnb")  # metadata of a cell that say how the site shows it
# The kernel gives each cell a file of its own, with another name in every process.
CELL_FILE = re.compile(r"(/[\w.-]+)*/ipykernel_\d+/\d+\.py")


def execute(path):
    """Return the executed notebook and the seconds that it took."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=2 * LIMIT,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
    )
    start = time.perf_counter()
    client.execute()
    return notebook, time.perf_counter() - start


def clean(notebook):
    """Remove properties of a single run or machine."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {key: cell.metadata[key] for key in SHOWN if key in cell.metadata}
        for output in cell.get("outputs", ()):
            if {"text/html", "text/markdown"} & set(output.get("data", ())):
                output.data.pop("text/plain", None)
            _replace_text(output)


def _replace_text(node):
    for key, value in node.items():
        if isinstance(value, dict):
            _replace_text(value)
        elif isinstance(value, str) and key != "image/png":
            node[key] = CELL_FILE.sub("cell", value)


def complaints(notebook, seconds):
    """Return what is wrong with an executed notebook."""
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                yield f"cell {number} writes to standard error:\n{output.text}"
    if seconds > LIMIT:
        yield f"takes {seconds:.0f} s; the limit is {LIMIT} s"


def run(path, write):
    """Execute one notebook, print how it went, and return whether it went well."""
    try:
        notebook, seconds = execute(path)
    except CellExecutionError as error:
        print(f"{path.name}: raised\n{error}", flush=True)
        return False
    clean(notebook)
    if write:
        nbformat.write(notebook, path)
    found = list(complaints(notebook, seconds))
    print(f"{path.name}: {seconds:.1f} s", *found, sep="\n  ", flush=True)
    return not found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of the names of notebooks; default: all")
    parser.add_argument("--write", action="store_true", help="store the outputs in the files")
    arguments = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_PPRINT_USE_COLOR": "0"}
    words = arguments.words or [""]
    paths = [path for path in NOTEBOOKS if any(word in path.name for word in words)]
    if not paths:
        sys.exit(f"No notebook in {DOCS} has one of {words} in its name.")
    well = [run(path, arguments.write) for path in paths]
    sys.exit(not all(well))


if __name__ == "__main__":
    main()
