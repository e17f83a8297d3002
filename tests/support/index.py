"""Package indexes and channels of tests: wheels with nothing in them, and directories over HTTP."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def package(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    requires: Sequence[str] = (),
    tag: str = "py3-none-any",
) -> Path:
    """A wheel with nothing in it."""
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {each}\n" for each in requires),
        f"{about}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        listed = [*files, f"{about}/RECORD"]
        archive.writestr(f"{about}/RECORD", "".join(f"{file},,\n" for file in listed))
    return path


class Site:
    """What a server answers with.

    Attributes:
        url: of the directory.
        instead: by name of a file, a page in its place; nothing at all where that is empty.
        everywhere: a page in the place of all else.
        asked: the paths that were asked for.
        moved: by the start of a path, what it is redirected to.
        secret: a user and password in base64, without which nothing else is given out.
    """

    def __init__(self) -> None:
        self.url = ""
        self.instead: dict[str, bytes] = {}
        self.everywhere: bytes | None = None
        self.asked: list[str] = []
        self.moved: dict[str, str] = {}
        self.secret = ""


class _Handler(SimpleHTTPRequestHandler):
    def __init__(self, *args: Any, site: Site, **kwargs: Any) -> None:
        self.site = site
        super().__init__(*args, **kwargs)

    def do_GET(self) -> None:
        self.site.asked.append(self.path)
        for old, new in self.site.moved.items():
            if self.path.startswith(old):
                self.send_response(308)
                self.send_header("Location", new + self.path[len(old) :])
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        if self.site.secret not in self.headers.get("Authorization", ""):
            self.send_error(401)
            return
        # Its 304 is without the headers that one needs: rattler takes it for an error.
        del self.headers["If-Modified-Since"]
        page = self.site.instead.get(self.path.rpartition("/")[2], self.site.everywhere)
        if page is None:
            super().do_GET()
            return
        self.send_response(200 if page else 404)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):  # who has seen enough hangs up
            self.wfile.write(page)

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def served(folder: Path) -> Iterator[Site]:
    """A directory over HTTP."""
    site = Site()
    handler = partial(_Handler, site=site, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    site.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
