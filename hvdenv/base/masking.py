"""Removes secrets and control sequences from text that hvdenv prints or stores.

A text is a secret because hvdenv knows its value: that of a variable whose name says that it is
secret, or of the credentials of a URL in a variable. A few are known by their form: credentials in
a URL, and tokens with a fixed prefix. The wording around them does not matter, and other text stays
as it is.
"""

from __future__ import annotations

import base64
import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, TypeVar, cast
from urllib.parse import quote, quote_plus, unquote

from hvdenv import STEP_PROGRAMS
from hvdenv.base.errors import StepError

T = TypeVar("T")

MASK = "***"
# What the names of secrets contain, but not other words: tokenizers, compass, keyring, public key.
# HVDENV_TOKEN marks hvdenv's own processes.
_SECRET_NAME = re.compile(
    r"(?i)(?<!^HVDENV_)TOKEN(?!I[SZ])|SECRET|JWT|(?<=_)PWD$|(?<!SA)(?<!AC)CRED(?!IT)"
    r"|(?<!COM)(?<!BY)(?<!ASK)PASS(?!IV|AGE|ENGER|THR|ES$)"
    # InfiniBand has numbers of partitions that are called P_Keys.
    r"|(?<!MON)(?<!TUR)(?<!HOT)(?<!PUB)(?<!PUBLIC)(?<!PUBLIC_)(?<!_P)KEY(?!RING|BOARD|MAP|WORD)"
)
# Names that end so describe a secret: SSH_KEY_TYPE.
_DESCRIBES = re.compile(
    r"(?i)_(FILE|PATH|DIR|TYPE|PROVIDER|FORMAT|SIZE|LENGTH|COUNT|TIMEOUT|LIFETIME)$"
)
# A shorter value is no secret: it would be found in ordinary text.
SHORTEST = 6
# Neither are numbers, words of a few letters, references, paths, and one repeated character.
_ORDINARY = re.compile(
    r"[-+]?[\d.,:_]{1,12}|0[xX][\dA-Fa-f]{1,8}|[A-Za-z]{1,7}|(.)\1*|\$\w+|\$\{\w+\}"
    r"|(~|\.{1,2}|\$\w+)?(/[\w.@:-]{1,30})+/?|-----(BEGIN|END) [A-Z ]+-----"
)
_WORDS = frozenset({
    "disabled", "optional", "required", "subprocess", "password", "changeme", "anonymous",
    "undefined", "unlimited", "tensorflow", "x86_64", "aarch64", "ppc64le", "localhost",
})  # fmt: skip
# Variables whose values are no secrets, even as a password.
_PUBLIC = ("USER", "LOGNAME", "HOSTNAME", "HOST")
# Every pattern is linear in the length of the text: logs contain very long words.
_USER_INFO = re.compile(
    r"://(?:(?P<user>[^/\s'\"@:?#]*):(?P<password>[^/\s'\"?#]*)|[^/\s'\"@:?#]{20,})@"
)
_PARAMETER = re.compile(r"(?P<name>[?&][\w.%-]{1,64}=)(?P<value>[^&;#\s'\"<>]+)")
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{30,60}\b|gh[oprsu]_[A-Za-z0-9]{36,60}\b|AKIA[0-9A-Z]{16}\b"
    r"|xox[abops]-[0-9][\w-]{10,80}|sk-[A-Za-z0-9]{40,60}\b|eyJ[\w-]{10,150}\.eyJ[\w.-]{20,})"
)
# What is a secret by its form, whatever the variables are.
_SHAPES = (
    (_USER_INFO, f"://{MASK}@"),
    (re.compile(r"(?i)(authorization: {0,4}\w{1,20} )[^\s'\"]+"), rf"\1{MASK}"),
    (re.compile(r"(?<=/t/)[a-z]{2}-[0-9a-f]{8}-[0-9a-f-]{20,40}(?=/)"), MASK),  # conda's tokens
    (_TOKEN, MASK),
)
_BASE64 = re.compile(r"[\w+/-]{8,}={0,2}")
# Terminal sequences, control characters (C0 and C1), and characters that change the order of
# text (bidi) or break lines.
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)

# The secrets of this process, in every form in which programs print them, and as whole words of
# base64: part of a longer word could be a record of a rank.
_known: set[str] = set()
_encoded: set[str] = set()


def is_secret(name: str) -> bool:
    """Whether the name of a variable says that its value is a secret."""
    return bool(_SECRET_NAME.search(name)) and not _DESCRIBES.search(name)


def holds_secret(name: str, value: str) -> bool:
    """Whether a variable holds a secret: KEY=1 does not."""
    return is_secret(name) and bool(_parts(value, shortest=1))


def has_password(value: str) -> bool:
    """Whether a value contains a URL with a password, which is none where it names a variable."""
    return any(
        found["password"] and not found["password"].startswith("$")
        for found in _USER_INFO.finditer(value)
    )


def learn(variables: Iterable[tuple[str, str]]) -> None:
    """Mask the secrets among these variables, and those in their URLs, from now on."""
    pairs = [*variables]
    public = {value for name, value in pairs if name in _PUBLIC}
    for name, value in pairs:
        if value not in public and is_secret(name):
            _add(value)
        if "://" in value:
            _learn_url(value)


def learn_from_pip() -> None:
    """Mask the passwords in the addresses of pip's configuration, which steps read."""
    with suppress(SystemExit):  # the steps refuse it
        program = runpy.run_path(str(STEP_PROGRAMS / "pip_sources.py"))
        values = {name: value for name, (value, _) in program["configuration"]().items()}
        values["proxy"] = f"//{values.get('proxy', '')}"  # pip accepts one without http://
        learn(values.items())


def _learn_url(text: str) -> None:
    for found in _USER_INFO.finditer(text):
        if password := found["password"]:
            _add(password)
            _add(unquote(password))
            _encoded.update(_base64(f"{found['user']}:{unquote(password)}"))
    for found in filter(_is_secret_parameter, _PARAMETER.finditer(text)):
        _add(found["value"])


def _parts(value: str, shortest: int = SHORTEST) -> list[str]:
    """What to mask of a value: all of it, and each of its lines, since logs are read in lines."""
    parts = {value.strip(), *(line.strip() for line in value.splitlines())}
    return [
        each
        for each in parts
        if len(each) >= shortest and not _ORDINARY.fullmatch(each) and each.lower() not in _WORDS
    ]


def _is_secret_parameter(found: re.Match[str]) -> bool:
    name = found["name"].strip("?&=")
    signature = name.lower().endswith(("sig", "signature"))
    return bool((signature or is_secret(name)) and _parts(found["value"], shortest=1))


def _add(value: str) -> None:
    for part in _parts(value):
        if part not in _known:
            _known.update(each for each in _forms(part) if len(each) >= SHORTEST)
            _encoded.update(_base64(part))


def _forms(value: str) -> Iterator[str]:
    """A value as programs print it."""
    content = value.encode("utf-8", "surrogateescape")
    yield from (quote(content, safe=""), quote(content), quote_plus(content))
    valid = content.decode("utf-8", "replace")
    for text in {value, valid, plain(valid)}:
        yield from (text, repr(text)[1:-1])
        yield from (json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
        # Of shells: inside of single and of double quotes, and without quotes.
        yield from (shlex.quote(text).strip("'"), text.replace("'", r"'\''"))
        yield re.sub(r'([\\"$`])', r"\\\1", text)
        yield re.sub(r"([^\w@%+=:,./-])", r"\\\1", text)


def _base64(value: str) -> Iterator[str]:
    content = value.encode("utf-8", "surrogateescape")
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(content).decode().rstrip("=")


def mask(text: str) -> str:
    """Replace known secrets, the credentials of URLs, and tokens that are known by their form."""
    for pattern, instead in _SHAPES:
        text = pattern.sub(instead, text)
    text = _PARAMETER.sub(
        lambda found: found["name"] + MASK if _is_secret_parameter(found) else found[0], text
    )
    text = _replaced(text, sorted(_spans(text)))
    if _encoded:
        text = _BASE64.sub(lambda word: MASK if word[0].rstrip("=") in _encoded else word[0], text)
    return text


def shown(name: str, value: str) -> str:
    """The value of a variable, to be shown or stored."""
    return MASK if value and is_secret(name) else mask(value)


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Where known secrets begin and end."""
    for value in _known:
        at = text.find(value)
        while at >= 0:
            yield at, at + len(value)
            at = text.find(value, at + len(value))


def _replaced(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """The text without these parts, which may overlap; they are sorted."""
    done, end = list[str](), 0
    for start, stop in spans:
        if start >= end:
            done += [text[end:start], MASK]
        end = max(end, stop)
    return "".join([*done, text[end:]])


def cut_before(data: bytes) -> int:
    """Where to cut a long line that is not read to its end, so that no secret is cut."""
    values = [value.encode("utf-8", "surrogateescape") for value in _known]
    end = len(data) - max(map(len, values), default=0)
    moved = True
    while moved and end > 0:
        moved = False
        for value in values:
            at = data.find(value, max(0, end - len(value) + 1), end + len(value) - 1)
            if 0 <= at < end:
                end, moved = at, True
    return end if end > 0 else len(data)


def plain(text: str) -> str:
    """Remove control sequences and characters, including C1 and bidi; keep tabs and newlines."""
    return _CONTROL.sub("", text)


def clean(text: str) -> str:
    """Text without control characters and secrets."""
    return mask(plain(text))


class CleanStream:
    """A stream for people. Text printed to it has no secrets and cannot control their terminal.

    Args:
        stream: None if its descriptor is closed.
        needed: whether a text that cannot be written is an error. Without a place for messages,
            the command still has its result.
    """

    def __init__(self, stream: TextIO | None, *, needed: bool = True) -> None:
        self.unfiltered = stream or open(os.devnull, "w")  # noqa: SIM115
        self._needed = needed

    def write(self, text: str) -> int:
        self.write_unfiltered(clean(text))
        return len(text)

    def write_unfiltered(self, text: str) -> None:
        """Write text whose foreign parts were filtered.

        Raises:
            BrokenPipeError: the reader has gone.
            StepError: the stream is needed, and cannot be written.
        """
        with self._whatever_fails():
            self.unfiltered.write(text)

    def flush(self) -> None:
        """Raises the same."""
        with self._whatever_fails():
            self.unfiltered.flush()

    @contextmanager
    def _whatever_fails(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # What is left cannot be written later either; Python would try it at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.unfiltered.fileno())
            if self._needed and isinstance(error, BrokenPipeError):
                raise
            if self._needed:
                raise StepError(
                    f"cannot write the output: {error.strerror}",
                    where="standard output",
                    remedy="free space there, or send the output elsewhere",
                ) from error

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


@contextmanager
def clean_output(variables: Iterable[tuple[str, str]] = ()) -> Iterator[None]:
    """Filter all output of this Python process; programs that it runs print directly.

    Args:
        variables: those of this process. What is learnt in the block is forgotten after it.
    """
    before = sys.stdout, sys.stderr
    sys.stdout = cast("TextIO", CleanStream(before[0]))
    sys.stderr = cast("TextIO", CleanStream(before[1], needed=False))
    with forgotten():
        learn(variables)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


@contextmanager
def forgotten() -> Iterator[None]:
    """A block that begins without known secrets, and leaves none."""
    before = [(each, {*each}) for each in (_known, _encoded)]
    try:
        for known, _ in before:
            known.clear()
        yield
    finally:
        for known, content in before:
            known.clear()
            known.update(content)


def print_coloured(text: str) -> None:
    """Print text with colours. The caller has removed other control characters."""
    getattr(sys.stdout, "write_unfiltered", sys.stdout.write)(mask(text))
