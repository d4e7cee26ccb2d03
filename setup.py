"""What an index shows of the package is README, where links of ours lead nowhere: they get the address of the repository.

pyproject.toml has all else, and the address: `Repository` in [project.urls]. Without one, README stays as it is.
"""

from __future__ import annotations

import re
from typing import Any

from setuptools import Distribution, setup

LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?![\w+.-]+:|#|/)([^)\s]+)\)")  # of Markdown, to a file of the repository


def absolute(text: str, repository: str, version: str) -> str:
    """With the addresses that GitHub and GitLab have for files of a tag: pictures as they are, other files as pages."""

    def link(found: re.Match[str]) -> str:
        kind = "raw" if found[1] else "blob"
        return f"{found[1]}[{found[2]}]({repository.rstrip('/')}/{kind}/v{version}/{found[3]})"

    return LINK.sub(link, text)


class Described(Distribution):
    def parse_config_files(self, *arguments: Any, **options: Any) -> None:
        super().parse_config_files(*arguments, **options)
        told = self.metadata
        if repository := (told.project_urls or {}).get("Repository"):
            static = type(told.long_description)  # setuptools' own str: no build makes another one, so it is not marked as dynamic
            told.long_description = static(absolute(told.long_description, repository, told.version))


setup(distclass=Described)
