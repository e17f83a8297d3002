"""Where pip is configured to look for packages, for programs that are not pip.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.
"""

import argparse
import base64
import configparser
import html
import html.parser
import http.client
import math
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
ALIASES = {"pypi-url": "index-url", "default-timeout": "timeout"}
YES, NO = ("1", "y", "yes", "t", "true", "on"), ("0", "n", "no", "f", "false", "off")
UNUSABLE = "hvdenv: pip's configuration cannot be used: %s: %s"
# How long an index of CPU builds may take to answer.
SECONDS = 3
# How long an index may take to show what it answers with, and what of that is read.
PAGE_SECONDS, LARGEST_PAGE = 5, 1 << 20
FILE = re.compile(r"""href=["']?[^"'>=\s]+\.(whl|tar\.gz|tar\.bz2|zip|egg)\b""", re.IGNORECASE)
TITLE = re.compile(r"<title[^<>]*>(.{0,200}?)</title>", re.IGNORECASE | re.DOTALL)
# Of opening and reading an address.
FAILURES = (OSError, ValueError, http.client.HTTPException)


def configuration() -> Dict[str, Tuple[str, str]]:
    """pip's options by name: the value, and the file or variable that sets it.

    Raises:
        SystemExit: a file is malformed.
    """
    environ, named = os.environ, os.environ.get("PIP_CONFIG_FILE", "")
    folders = (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    files = [*(os.path.join(folder, "pip/pip.conf") for folder in folders), "/etc/pip.conf"]
    if not os.path.exists(named):  # pip reads it instead of the user's files
        own = environ.get("XDG_CONFIG_HOME") or "~/.config"
        files += ["~/.pip/pip.conf", os.path.join(own, "pip/pip.conf")]
    files += [os.path.join(sys.prefix, "pip.conf"), named]
    variables = {name[len("PIP_") :]: (value, name) for name, value in environ.items()}
    layers = {name: {} for name in SECTIONS}  # type: Dict[str, Dict[str, Tuple[str, str]]]
    layers[""] = {n: pair for n, pair in variables.items() if pair[1].startswith("PIP_")}
    for path in map(os.path.expanduser, files if named != os.devnull else ()):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except configparser.ParsingError as error:
            errors = getattr(error, "errors", ())
            line = errors[0][0] if errors else getattr(error, "lineno", 1)
            problem = "neither [SECTION] nor NAME = VALUE"
            raise SystemExit(UNUSABLE % ("%s:%s" % (path, line), problem)) from None
        except (configparser.Error, UnicodeDecodeError) as error:
            raise SystemExit(UNUSABLE % (path, str(error).splitlines()[0])) from None
        for section in filter(parser.has_section, SECTIONS):
            layers[section].update({name: (text, path) for name, text in parser.items(section)})
    found = {}
    for layer in layers.values():
        for name, pair in layer.items():
            if pair[0]:  # pip ignores empty values
                name = name.lower().replace("_", "-").lstrip("-")
                found[ALIASES.get(name, name)] = pair
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # pip reads these as well
        if environ.get(name):
            found.setdefault("cert", (environ[name], name))
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
        timeout: of pip, in whole seconds.
        indexes: the main one first; none where pip is to use none.
        cpu_indexes: those of CPU builds that answer; they are among the indexes.
        links: directories and pages with links to files.

    Raises:
        SystemExit: pip's configuration cannot be used.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._set = configuration()
        self.pip = {name: value for name, (value, _) in self._set.items()}
        for name in ("cert", "client-cert"):
            self.pip[name] = os.path.expanduser(self.pip.get(name, ""))
        try:
            self.timeout = min(max(1, math.ceil(float(self.pip.get("timeout", 60)))), 10**6)
        except (ValueError, OverflowError):
            raise self._unusable("timeout", "not a number of seconds") from None
        self.indexes, self.links = [], []  # type: Tuple[List[str], List[str]]
        self.cpu_indexes = []  # type: List[str]
        links = self.pip.get("find-links", "").split() + options.find_links
        self.links = [local(each) for each in links]
        # pip ignores directories that do not exist.
        self.links = [each for each in self.links if "://" in each or os.path.exists(each)]
        no_index = self.pip.get("no-index", "no").lower()
        if no_index not in YES + NO:
            raise self._unusable("no-index", "neither yes nor no")
        if not options.no_index and no_index in NO:
            extra = self.pip.get("extra-index-url", "").split() + options.extra_index_url
            named = [self.pip.get("index-url", DEFAULT_INDEX), *extra]
            self.indexes = [each if "://" in each else file_url(local(each)) for each in named]
        for name in ("index-url", "extra-index-url", "find-links"):
            for each in self.pip.get(name, "").split():
                if "://" in each:
                    self._refuse_malformed(name, each)
                elif self.indexes and name != "find-links" and not os.path.isdir(local(each)):
                    raise self._unusable(name, "neither a URL nor a directory")
        if any(each.startswith("https:") for each in self.indexes + self.links):
            for name in ("cert", "client-cert"):
                if self.pip[name] and not os.path.exists(self.pip[name]):
                    said = "hvdenv: no certificates at %s (%s in %s)"
                    raise SystemExit(said % (self.pip[name], name, self._set[name][1]))
        if self.indexes:
            self.cpu_indexes = [each for each in options.cpu_index if self._answers(each + "/")]
            self.indexes += self.cpu_indexes

    def _refuse_malformed(self, name: str, url: str) -> None:
        try:
            urllib.parse.urlsplit(url)
        except ValueError:
            raise self._unusable(name, "not a URL") from None

    def _unusable(self, name: str, problem: str) -> SystemExit:
        value, origin = self._set[name]
        shown = value.rpartition("@")[2]  # a password may contain anything
        return SystemExit(UNUSABLE % ("%s = %s in %s" % (name, shown, origin), problem))

    def files(self, name: str) -> Iterator[str]:
        """Addresses of files of a package."""
        project = re.sub(r"[-_.]+", "-", name).lower()
        for place in self.links:
            if os.path.isdir(place):
                for file in sorted(os.listdir(place)):
                    yield file_url(os.path.join(place, file))
            else:
                yield from self._page(place if "://" in place else file_url(place))
        for index in self.indexes:
            yield from self._page("%s/%s/" % (index.rstrip("/"), project))

    def _page(self, url: str) -> Iterator[str]:
        reader = Links()
        try:
            with self.open(url) as answer:
                reader.base = answer.geturl()  # after redirects
                reader.feed(answer.read().decode("utf-8", "replace"))
        except FAILURES as error:
            print("hvdenv: %s: %s" % (without_password(url), error))
        for link in reader.found:
            yield urllib.parse.urljoin(reader.base, link)

    def _answers(self, url: str) -> bool:
        """Whether an index answers; one that does not is reported."""
        if not url.startswith("http"):
            return True
        try:
            with self.open(re.sub(r"(?<!/)/+$", "/", url), SECONDS):
                return True
        except FAILURES as error:
            # An index need not have a page that lists all packages, or may refuse to show it.
            if 400 <= getattr(error, "code", 0) < 500:
                return True
            reason, shown = getattr(error, "reason", error), without_password(url).rstrip("/")
            print("hvdenv: no answer from %s (%s); continuing without it" % (shown, reason))
            sys.stdout.flush()
            return False

    def open(self, url: str, seconds: int = 0) -> Any:
        """Open an address with the certificates, proxy and passwords of pip's configuration."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme == "file" and os.path.isdir(local(url)):
            url = url.rstrip("/") + "/index.html"
        handlers = [Https(self), Redirects(self)]  # type: List[Any]
        if self.pip.get("proxy"):
            proxies = dict.fromkeys(("http", "https"), self.pip["proxy"])
            handlers.append(urllib.request.ProxyHandler(proxies))
        opener = urllib.request.build_opener(*handlers)
        return opener.open(self.request_of(url), timeout=seconds or self.timeout)

    def context_of(self, url: str) -> ssl.SSLContext:
        """How the server of an address is verified."""
        cert = self.pip["cert"] or None
        folder = {"capath": cert} if cert and os.path.isdir(cert) else {"cafile": cert}
        context = ssl.create_default_context(**folder)
        if self.pip["client-cert"]:
            context.load_cert_chain(self.pip["client-cert"])
        parts, hosts = urllib.parse.urlsplit(url), self.pip.get("trusted-host", "").split()
        if parts.hostname in hosts or parts.netloc.rpartition("@")[2] in hosts:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    def request_of(self, url: str) -> urllib.request.Request:
        """A request for an address, which may contain a password."""
        request = urllib.request.Request(without_password(url))
        secret = self._password(urllib.parse.urlsplit(url))
        if secret:
            user, _, password = secret.partition(":")
            encoded = base64.b64encode(("%s:%s" % (user, password)).encode()).decode()
            request.add_unredirected_header("Authorization", "Basic " + encoded)
        return request

    def _password(self, parts: urllib.parse.SplitResult) -> str:
        """USER:PASSWORD for an address: its own, that of an index on this host, or netrc's."""
        host = parts.netloc.rpartition("@")[2]
        known = [urllib.parse.urlsplit(each) for each in self.indexes + self.links]
        for each in [parts, *known]:
            user, _, other = each.netloc.rpartition("@")
            # A password given for https is never sent over http.
            if user and other == host and each.scheme in (parts.scheme, "http"):
                return urllib.parse.unquote(user)
        plain = [each.hostname for each in known if each.scheme == "http"]
        if parts.scheme == "http" and parts.hostname not in plain:
            return ""
        for path in [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]:
            try:
                found = netrc.netrc(os.path.expanduser(path)).authenticators(parts.hostname or "")
            except (OSError, UnicodeDecodeError, netrc.NetrcParseError):
                continue
            return "%s:%s" % (found[0], found[2]) if found else ""
        return ""


class Https(urllib.request.HTTPSHandler):
    """Verifies each server as it is configured, also those that a redirect leads to."""

    def __init__(self, sources: Sources) -> None:
        super().__init__()
        self.sources = sources

    def https_open(self, request: urllib.request.Request) -> Any:
        # Not its host, which may be the proxy's.
        context = self.sources.context_of(request.full_url)
        return self.do_open(http.client.HTTPSConnection, request, context=context)


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, with the password for the address that they lead to."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources

    def redirect_request(self, *words: Any) -> urllib.request.Request:
        return self.sources.request_of(words[-1])

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302  # before Python 3.11


class Links(html.parser.HTMLParser):
    """Reads the links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.base = ""
        self.found = []  # type: List[str]

    def handle_starttag(self, tag: str, attrs: List[Tuple[str, Optional[str]]]) -> None:
        link = dict(attrs).get("href") or ""
        if tag == "a" and link:
            self.found.append(link)
        if tag == "base":
            self.base = urllib.parse.urljoin(self.base, link)

    def error(self, message: str) -> None:
        """Before Python 3.10, the base class demands it."""


def file_url(path: str) -> str:
    return "file://" + urllib.request.pathname2url(os.path.abspath(path))


def local(place: str) -> str:
    """The path of a file: URL; other URLs and paths stay."""
    if place.startswith("file:"):
        return urllib.request.url2pathname(urllib.parse.urlsplit(place).path)
    return os.path.expanduser(place)


def file_name(url: str) -> str:
    return urllib.parse.unquote(os.path.basename(urllib.parse.urlsplit(url).path))


def without_password(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def other_page(url: str) -> Optional[str]:
    """ ": TITLE" or "" if a URL answers with a page that is no index, such as a login page; else None."""
    text = read_page(url)
    found = TITLE.search(text)
    title = " ".join(html.unescape(found.group(1)).split()) if found else ""
    # An index links to a package, or has this title and no packages.
    if FILE.search(text) or title.startswith("Links for") or not text.lstrip().startswith("<"):
        return None
    return title and ": " + title[:80]


def read_page(url: str) -> str:
    """The beginning of a page; empty without an answer."""
    try:
        sources = Sources(parser_of_sources().parse_args([]))
        with sources.open(url, PAGE_SECONDS) as answer:
            return str(answer.read(LARGEST_PAGE).decode("utf-8", "replace"))
    except (SystemExit, *FAILURES):
        return ""


def report_other_pages(package: str, *indexes: str) -> None:
    """Print which indexes answer with a page that is none: pip only says that it found no version."""
    for index in indexes:
        title = other_page("%s/%s/" % (index.rstrip("/"), re.sub(r"[-_.]+", "-", package).lower()))
        if title is not None:
            said = "hvdenv: %s answers with a page that is no package index%s"
            print(said % (without_password(index), title))
