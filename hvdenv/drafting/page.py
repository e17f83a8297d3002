"""What earlier commands of a page mean for later ones."""

from __future__ import annotations

import sys

from hvdenv.drafting.values import Value

_LAST = sys.maxsize


class Page:
    """The state of a page.

    Attributes:
        scheduler: of the directives read so far, or implied by a program; empty if unknown.
        repository, folder, tag: of the last clone.
        builds_horovod: how often the page installs Horovod.
        of_image: whether it is a Dockerfile.
        modules: those that it loads, by sequences that start from nothing.
        place: in the last sequence, where the next module goes.
        purged: whether the page itself unloads everything before the last sequence.
    """

    def __init__(self) -> None:
        self.scheduler = ""
        self.repository = self.folder = self.tag = ""
        self.builds_horovod = 0
        self.of_image = False
        self.modules: list[list[Value]] = [[]]
        self.purged = False
        self.place = _LAST

    def start_modules(self, *, stated: bool = False) -> None:
        self.modules.append([])
        self.purged = stated

    def add_module(self, load: Value) -> None:
        """A module that is loaded again begins a new sequence."""
        if any(each.value == load.value for each in self.modules[-1]):
            self.start_modules()
        self.modules[-1].insert(self.place, load)
        self.place = _LAST

    def remove_module(self, name: str, *, swap: bool = False) -> Value | None:
        """Unload a module of the last sequence, named with or without its version.

        Args:
            swap: the next module is loaded in its place.
        """
        loads = self.modules[-1]
        names = [f"{each.value}/" for each in loads]
        fitting = (n for n, each in enumerate(names) if name and each.startswith(f"{name}/"))
        place = next(fitting, _LAST)
        if place == _LAST:
            return None
        self.place = place if swap else _LAST
        return loads.pop(place)
