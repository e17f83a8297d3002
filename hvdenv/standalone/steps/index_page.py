"""Report package indexes that answer with some other page, such as the login page of a network.

Stand-alone: imports nothing of hvdenv and runs on Python 3.6 and newer.

    index_page.py PACKAGE URL...

pip only says that it found no version. A page counts as an index if it links to a package,
or has the title of an index page without packages.
"""

import html
import os
import re
import sys
from typing import Optional

if getattr(sys.flags, "safe_path", False):  # PYTHONSAFEPATH leaves out this directory
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from pip_sources import FAILURES, Sources, parser_of_sources, without_password

SECONDS = 5
LARGEST = 1 << 20
FILE = re.compile(r"""href=["']?[^"'>=\s]+\.(whl|tar\.gz|tar\.bz2|zip|egg)\b""", re.IGNORECASE)
TITLE = re.compile(r"<title[^<>]*>(.{0,200}?)</title>", re.IGNORECASE | re.DOTALL)


def other_page(url: str) -> Optional[str]:
    """ ": TITLE" or "" if a URL answers with a page that is no index; else None."""
    text = read(url)
    title = None if text is None else title_of_other(text)
    return ": " + title if title else title


def read(url: str) -> Optional[str]:
    """The beginning of a page; None without an answer."""
    try:
        sources = Sources(parser_of_sources().parse_args([]))
        with sources.open(url, SECONDS) as answer:
            return str(answer.read(LARGEST).decode("utf-8", "replace"))
    except (SystemExit, *FAILURES):
        return None


def title_of_other(text: str) -> Optional[str]:
    """The title of an HTML page that is no index page; None for everything else."""
    found = TITLE.search(text)
    title = " ".join(html.unescape(found.group(1)).split()) if found else ""
    if FILE.search(text) or title.startswith("Links for") or not text.lstrip().startswith("<"):
        return None
    return title[:80]


def main(package: str, *indexes: str) -> None:
    for index in indexes:
        url = "%s/%s/" % (index.rstrip("/"), re.sub(r"[-_.]+", "-", package).lower())
        title = other_page(url)
        if title is not None:
            print(
                "hvdenv: %s answers with a page that is no package index%s"
                % (without_password(index), title)
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
