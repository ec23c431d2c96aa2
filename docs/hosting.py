"""Links that depend on the host of the project, for the package's metadata and the site.

The host comes from environment variables of the workflows; without them, these links are omitted.
The file needs only the standard library, because a build imports it.
"""

import copy
import os
import re

COLAB = "https://colab.research.google.com/github"
GITHUB = "https://github.com/"


def repository(environment=os.environ):
    """Return the address of the repository, or ``None`` if unknown."""
    server, name = (environment.get(f"GITHUB_{x}") for x in ("SERVER_URL", "REPOSITORY"))
    return f"{server}/{name}" if server and name else None


def project_urls(where):
    """Return the project URLs of a package on a registry."""
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
    """Return the Colab address of a notebook, or ``None`` outside GitHub."""
    if where is None or not where.startswith(GITHUB):
        return None
    return f"{COLAB}/{where.removeprefix(GITHUB)}/blob/gh-pages/colab/{name}.ipynb"


def for_colab(notebook, where, revision="HEAD"):
    """Return a notebook with a first cell that installs its packages; outputs are kept."""
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
