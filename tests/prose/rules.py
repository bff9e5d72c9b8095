"""Rules in vale's format (https://vale.sh/docs/styles): `occurrence` over sentences, `substitution`, `existence`."""

from __future__ import annotations

import configparser
import fnmatch
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from prose.passages import Passage, sentences


class Rule:
    """One file of a style."""

    def __init__(self, name: str, declared: dict[str, Any]) -> None:
        self.name, self.message, self.declared = name, declared["message"], declared
        kinds = {"occurrence": self._occurrence, "substitution": self._substitution, "existence": self._existence}
        if declared["extends"] not in kinds:
            raise ValueError(f"{name}: extends {declared['extends']!r}; this reader knows {', '.join(kinds)}")
        self.findings = kinds[declared["extends"]]

    def _occurrence(self, passage: Passage) -> Iterator[str]:
        for sentence in sentences(passage.text):
            found = len(re.findall(self.declared["token"], sentence))
            if found > self.declared["max"]:
                yield f"{self.message} ({found}: {sentence[:60]}...)"

    def _substitution(self, passage: Passage) -> Iterator[str]:
        for banned, preferred in self.declared["swap"].items():
            for found in self._matches(banned, passage.text):
                yield self.message % (preferred, found)

    def _existence(self, passage: Passage) -> Iterator[str]:
        for token in self.declared["tokens"]:
            for found in self._matches(token, passage.text):
                yield self.message % found

    def _matches(self, pattern: str, text: str) -> list[str]:
        flags = re.IGNORECASE if self.declared.get("ignorecase") else 0
        return [found[0] for found in re.finditer(rf"\b(?:{pattern})\b", text, flags)]


class Configuration:
    """A .vale.ini: which styles and rules a path is held to. The last section that matches a path wins."""

    def __init__(self, path: Path) -> None:
        self._parser = configparser.ConfigParser()
        self._parser.optionxform = str  # type: ignore[assignment,method-assign]
        self._parser.read_string(f"[top]\n{path.read_text()}")
        styles = path.parent / self._parser["top"]["StylesPath"]
        files = sorted(styles.glob("*/*.yml"))
        self._rules = {f"{file.parent.name}.{file.stem}": yaml.safe_load(file.read_text()) for file in files}

    @functools.cache  # noqa: B019  # there is one configuration in a process
    def rules_of(self, path: str) -> list[Rule]:
        """Return the rules of a path that is relative to the repository, and of a part of it, in their order of name."""
        chosen: dict[str, bool] = {}
        for section in self._parser.sections()[1:]:
            if fnmatch.fnmatch(path, section):
                options = dict(self._parser[section])
                styles = options.pop("BasedOnStyles", "").split(",")
                chosen |= {name: True for name in self._rules if name.partition(".")[0] in map(str.strip, styles)}
                chosen |= {name: value.upper() != "NO" for name, value in options.items()}
        return [Rule(name, self._rules[name]) for name, is_on in sorted(chosen.items()) if is_on]
