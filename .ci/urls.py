"""What an index shows: [project.urls], and README with links that lead to the repository.

Of one variable that the release sets, REPOSITORY_URL=https://HOST/OWNER/NAME. Without it there are no urls and no links.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Urls(MetadataHookInterface):
    """Fills in what pyproject.toml calls dynamic."""

    def update(self, metadata: dict[str, object]) -> None:
        """Fill in the links."""
        repository = os.environ.get("REPOSITORY_URL", "").rstrip("/")
        pages = {
            "Repository": "",
            "Documentation": "/tree/main/docs",
            "Changelog": "/blob/main/CHANGELOG.md",
            "Issues": "/issues",
            "Security": "/blob/main/.github/SECURITY.md",
        }
        metadata["urls"] = {name: repository + page for name, page in pages.items()} if repository else {}
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if repository:  # a picture is shown as it is, a page as the repository shows it
            text = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\1{repository}/raw/main/", text)
            text = re.sub(r"(\]\()(?!https?:|#)", rf"\1{repository}/blob/main/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
