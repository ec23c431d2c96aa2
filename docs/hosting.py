"""What depends on where the project is hosted, for the package's metadata and the site.

The workflows know where they run, and nobody writes it down: without them (or the same variables of
the environment) there are no such links. Needs nothing but Python, since a build imports it.
"""

import copy
import os
import re

COLAB = "https://colab.research.google.com/github"
GITHUB = "https://github.com/"


def repository(environment=os.environ):
    """Return the address of the repository, or ``None`` where nobody knows."""
    server, name = (environment.get(f"GITHUB_{x}") for x in ("SERVER_URL", "REPOSITORY"))
    return f"{server}/{name}" if server and name else None


def project_urls(where):
    """Return what a registry shows beside a package."""
    if where is None:
        return {}
    urls = {"Source": where, "Issues": f"{where}/issues"}
    urls["Changelog"] = f"{where}/blob/HEAD/CHANGELOG.md"
    if where.startswith(GITHUB):
        owner, name = where.removeprefix(GITHUB).split("/")
        urls["Documentation"] = f"https://{owner.lower()}.github.io/{name}/"
    return urls


def absolute_links(markdown, where):
    """Return a page whose links and pictures work away from its repository."""
    if where is None:
        return markdown

    def absolute(match):
        kind = "raw" if match["picture"] else "blob"
        return f"{match['picture']}[{match['text']}]({where}/{kind}/HEAD/{match['target']})"

    link = r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?:|#)(?P<target>[^)\s]+)\)"
    return re.sub(link, absolute, markdown)


def colab_link(name, where):
    """Return where Colab opens a notebook, or ``None``: it opens those on GitHub."""
    if where is None or not where.startswith(GITHUB):
        return None
    return f"{COLAB}/{where.removeprefix(GITHUB)}/blob/gh-pages/colab/{name}.ipynb"


def for_colab(notebook, where, revision="HEAD"):
    """Return a notebook that first installs what it needs; its outputs stay."""
    notebook = copy.deepcopy(notebook)
    if where is not None:
        wanted = f"braintrace[examples,frameworks] @ git+{where}@{revision}"
        install = {
            "cell_type": "code",
            "execution_count": None,
            "id": "install",
            "metadata": {},
            "outputs": [],
            "source": f'%pip install -q "{wanted}"',
        }
        notebook["cells"].insert(0, install)
    return notebook


def with_links(notebook, name, where):
    """Return a notebook with links to Colab and to itself below its title."""
    notebook = copy.deepcopy(notebook)
    title, _, rest = "".join(notebook["cells"][0]["source"]).partition("\n")
    links = [f'<a href="../colab/{name}.ipynb" download>Download this notebook</a>']
    colab = colab_link(name, where)
    if colab is not None:
        links.insert(0, f'<a href="{colab}">Open in Colab</a>')
    line = f'<p class="notebook-links">{" · ".join(links)}</p>'
    notebook["cells"][0]["source"] = f"{title}\n\n{line}\n{rest}"
    return notebook
