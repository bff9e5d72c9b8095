"""[project.urls], of one variable that the release sets: REPOSITORY_URL=https://HOST/OWNER/NAME. Without it there are none."""

import os

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Urls(MetadataHookInterface):
    """What an index shows beside the package."""

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
