"""What earlier commands of a page mean for later ones."""

from __future__ import annotations

from hvdenv.drafting.values import Value


class Loads:
    """The modules of a page, by sequences that start from nothing.

    Attributes:
        purged: whether the page itself unloads everything before the last sequence.
    """

    def __init__(self) -> None:
        self.sequences: list[list[Value]] = [[]]
        self.purged = False

    def purge(self, *, stated: bool = False) -> None:
        self.sequences.append([])
        self.purged = stated

    def add(self, load: Value) -> None:
        """A module that is loaded again begins a new sequence."""
        if any(each.value == load.value for each in self.sequences[-1]):
            self.purge()
        self.sequences[-1].append(load)


class Page:
    """The state of a page.

    Attributes:
        scheduler: of the directives read so far, or implied by a program; empty if unknown.
        repository, folder, tag: of the last clone.
        builds_horovod: whether the page installs Horovod.
        channels: of conda's configuration that have releases, by their addresses without these.
    """

    def __init__(self) -> None:
        self.scheduler = ""
        self.repository = self.folder = self.tag = ""
        self.builds_horovod = False
        self.channels: dict[str, str] = {}
        self.loads = Loads()
