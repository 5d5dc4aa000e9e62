"""Patches of mutations, made by git in the project's repository on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .baseline import is_test_file
from .program import git
from .source_text import SourceText

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from .mutation import Mutation

OPTIONS = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--unified=3")


class Patches:
    """Owns the repository's working tree while a patch is made; use it from one thread at a time."""

    def __init__(self, repository: Path, paths: Iterable[str], tests: Sequence[str]) -> None:
        self._repository = repository
        self.sources: dict[str, SourceText] = {}
        """By path, those files that may change."""
        for path in paths:
            file = repository / path
            if is_test_file(path, tests) or not path.endswith(".py") or file.is_symlink() or not file.is_file():
                continue
            try:
                self.sources[path] = SourceText(file.read_bytes())
            except ValueError:
                continue

    def read(self, path: str) -> str:
        """Return the text of any file of the repository; empty if there is none."""
        file = (self._repository / path).resolve()
        if not file.is_relative_to(self._repository.resolve()) or not file.is_file():
            return ""
        return file.read_text("utf-8", "replace")

    def of(self, path: str, mutation: Mutation) -> tuple[str, str]:
        """Return the patch that makes a mutation, and the one that takes it back."""
        file, source = self._repository / path, self.sources[path]
        file.write_bytes(mutation.apply(source.data))
        try:
            forth = self._diff("--src-prefix=a/", "--dst-prefix=b/", path)
            back = self._diff("-R", "--src-prefix=b/", "--dst-prefix=a/", path)
        finally:
            file.write_bytes(source.data)
        return forth, back

    def _diff(self, *arguments: str) -> str:
        *options, path = arguments
        return git(*OPTIONS, *options, "--", path, folder=self._repository, problem=f"no patch can be made of {path}")
