"""Where pip is configured to look for packages, for programs that are not pip.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.

    pip_sources.py NAME [SOURCE...]

As a program, it prints the source archives that there are of a package, a line for each: name of
the file, and which Pythons it is for.
"""

import argparse
import base64
import configparser
import html.parser
import http.client
import netrc
import os
import re
import ssl
import sys
import urllib.parse
import urllib.request
from typing import Any, Dict, Iterator, List, Optional, Tuple

DEFAULT_INDEX = "https://pypi.org/simple"
# Of pip's configuration; later ones win.
SECTIONS = ("global", "install")
YES = ("1", "true", "yes", "on")
SECONDS = 3
ARCHIVES = (".tar.gz", ".tar.bz2", ".zip")
# Of opening and reading an address.
FAILURES = (OSError, ValueError, http.client.HTTPException)


def configuration() -> Dict[str, str]:
    """pip's options by name: those in its files, then those in variables."""
    environ, named = os.environ, os.environ.get("PIP_CONFIG_FILE", "")
    folders = environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")
    own = environ.get("XDG_CONFIG_HOME", "~/.config")
    files = [
        *(os.path.join(folder, "pip/pip.conf") for folder in folders),
        "/etc/pip.conf",
        "~/.pip/pip.conf",
        os.path.join(own, "pip/pip.conf"),
        os.path.join(sys.prefix, "pip.conf"),
        named,
    ]
    parser = configparser.RawConfigParser()
    if named != os.devnull:
        parser.read([os.path.expanduser(each) for each in files], encoding="utf-8")
    found = {}
    for section in filter(parser.has_section, SECTIONS):
        found.update({name.replace("_", "-"): text for name, text in parser.items(section)})
    for name, value in environ.items():
        if name.startswith("PIP_"):
            found[name[len("PIP_") :].lower().replace("_", "-")] = value
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # pip reads these as well
        if os.path.isfile(environ.get(name, "")):
            found.setdefault("cert", environ[name])
    for name in ("cert", "client-cert"):
        found[name] = os.path.expanduser(found.get(name, ""))
    return found


def parser_of_sources() -> argparse.ArgumentParser:
    """Where to look besides pip's configuration, by the names of pip's options."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--no-index", action="store_true")
    for name in ("--extra-index-url", "--find-links", "--cpu-index"):
        parser.add_argument(name, action="append", default=[])
    return parser


class Sources:
    """Indexes, and other places with files.

    Attributes:
        pip: the options of pip's configuration.
        indexes: the main one first; none where pip is to use none.
        cpu_indexes: those of CPU builds that answer; they are among the indexes.
        links: directories and pages with links to files.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.pip = configuration()
        self.indexes, self.links = [], []  # type: Tuple[List[str], List[str]]
        self.cpu_indexes = []  # type: List[str]
        if not options.no_index and self.pip.get("no-index", "").lower() not in YES:
            extra = self.pip.get("extra-index-url", "").split() + options.extra_index_url
            self.indexes = [self.pip.get("index-url", DEFAULT_INDEX), *extra]
            self.cpu_indexes = [each for each in options.cpu_index if self._answers(each)]
            self.indexes += self.cpu_indexes
        links = self.pip.get("find-links", "").split() + options.find_links
        self.links = [os.path.expanduser(each) for each in links]
        # pip passes over directories that are not there.
        self.links = [each for each in self.links if "://" in each or os.path.exists(each)]

    def files(self, name: str) -> Iterator[Tuple[str, Dict[str, str]]]:
        """Addresses of files of a package, each with the attributes of its link."""
        project = re.sub(r"[-_.]+", "-", name).lower()
        for place in self.links:
            if os.path.isdir(place):
                for file in sorted(os.listdir(place)):
                    yield file_url(os.path.join(os.path.abspath(place), file)), {}
            else:
                yield from self._page(place if "://" in place else file_url(place))
        for index in self.indexes:
            yield from self._page("%s/%s/" % (index.rstrip("/"), project))

    def _page(self, url: str) -> Iterator[Tuple[str, Dict[str, str]]]:
        reader = Links()
        try:
            with self.open(url) as answer:
                reader.feed(answer.read().decode("utf-8", "replace"))
        except FAILURES as error:
            print("hvdenv: %s: %s" % (without_password(url), error))
        for attributes in reader.found:
            yield urllib.parse.urljoin(url, attributes["href"]), attributes

    def _answers(self, url: str) -> bool:
        """Whether an index answers; one that does not is reported."""
        try:
            with self.open(url.rstrip("/") + "/", SECONDS):
                return True
        except FAILURES as error:
            reason, shown = getattr(error, "reason", error), without_password(url)
            print("hvdenv: no answer from %s (%s); continuing without it" % (shown, reason))
            sys.stdout.flush()
            return False

    def open(self, url: str, seconds: int = 60) -> Any:
        """Open an address with the certificates, proxy and passwords of pip's configuration."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme == "file" and os.path.isdir(urllib.request.url2pathname(parts.path)):
            url = url.rstrip("/") + "/index.html"
        context = ssl.create_default_context(cafile=self.pip["cert"] or None)
        if self.pip["client-cert"]:
            context.load_cert_chain(self.pip["client-cert"])
        hosts = self.pip.get("trusted-host", "").split()
        if parts.hostname in hosts or parts.netloc.rpartition("@")[2] in hosts:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        handlers = [urllib.request.HTTPSHandler(context=context)]  # type: List[Any]
        if self.pip.get("proxy"):
            proxies = dict.fromkeys(("http", "https"), self.pip["proxy"])
            handlers.append(urllib.request.ProxyHandler(proxies))
        request = urllib.request.Request(without_password(url))
        secret = self._password(parts)
        if secret:
            encoded = base64.b64encode(secret.encode()).decode()
            request.add_unredirected_header("Authorization", "Basic " + encoded)
        return urllib.request.build_opener(*handlers).open(request, timeout=seconds)

    def _password(self, parts: urllib.parse.SplitResult) -> str:
        """USER:PASSWORD for an address: its own, that of an index on this host, or netrc's."""
        host = parts.netloc.rpartition("@")[2]
        known = [urllib.parse.urlsplit(each).netloc for each in self.indexes + self.links]
        for netloc in [parts.netloc, *known]:
            user, _, other = netloc.rpartition("@")
            if user and other == host:
                return urllib.parse.unquote(user)
        try:
            found = netrc.netrc().authenticators(parts.hostname or "")
        except (OSError, netrc.NetrcParseError):
            found = None
        return "%s:%s" % (found[0], found[2]) if found else ""


class Links(html.parser.HTMLParser):
    """Reads the links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found = []  # type: List[Dict[str, str]]

    def handle_starttag(self, tag: str, attrs: List[Tuple[str, Optional[str]]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        if tag == "a" and "href" in attributes:
            self.found.append(attributes)

    def error(self, message: str) -> None:
        """Before Python 3.10, the base class demands it."""


def file_url(path: str) -> str:
    return "file://" + urllib.request.pathname2url(path)


def file_name(url: str) -> str:
    return urllib.parse.unquote(os.path.basename(urllib.parse.urlsplit(url).path))


def without_password(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


if __name__ == "__main__":
    PARSER = parser_of_sources()
    PARSER.add_argument("name")
    OPTIONS = PARSER.parse_args()
    for address, link in Sources(OPTIONS).files(OPTIONS.name):
        if address.partition("#")[0].endswith(ARCHIVES):
            print("%s %s" % (file_name(address), link.get("data-requires-python", "")))
