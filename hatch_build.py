"""What the package's metadata say of where it comes from; see `docs/hosting.py`."""

import importlib.util
import pathlib
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class CustomMetadataHook(MetadataHookInterface):
    """The README with links that work on a registry's page, and the project's addresses."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in what `pyproject.toml` calls dynamic."""
        root = pathlib.Path(self.root)
        spec = importlib.util.spec_from_file_location("hosting", root / "docs" / "hosting.py")
        assert spec is not None and spec.loader is not None
        hosting = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(hosting)
        where = hosting.repository()
        text = hosting.absolute_links((root / "README.md").read_text(encoding="utf-8"), where)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = hosting.project_urls(where)
