"""What earlier commands of a page mean for later ones."""

from __future__ import annotations

from hvdenv.drafting.values import Value


class Page:
    """The state of a page.

    Attributes:
        scheduler: of the directives read so far, or implied by a program; empty if unknown.
        repository, folder, tag: of the last clone.
        builds_horovod: whether the page installs Horovod.
        modules: those that it loads, by sequences that start from nothing.
        purged: whether the page itself unloads everything before the last sequence.
    """

    def __init__(self) -> None:
        self.scheduler = ""
        self.repository = self.folder = self.tag = ""
        self.builds_horovod = False
        self.modules: list[list[Value]] = [[]]
        self.purged = False

    def start_modules(self, *, stated: bool = False) -> None:
        self.modules.append([])
        self.purged = stated

    def add_module(self, load: Value) -> None:
        """A module that is loaded again begins a new sequence."""
        if any(each.value == load.value for each in self.modules[-1]):
            self.start_modules()
        self.modules[-1].append(load)
