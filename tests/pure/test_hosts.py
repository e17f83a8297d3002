from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdenv.errors import UsageError
from hvdenv.sites.hosts import MOST_HOSTS, Host, distribute, expand, parse_hostfile, parse_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu32:4,gpu33:4", [("gpu32", 4), ("gpu33", 4)]),
        (" f1:2 , f2:2,f3:1", [("f1", 2), ("f2", 2), ("f3", 1)]),
        ("gpu[32-33,40]:2", [("gpu32", 2), ("gpu33", 2), ("gpu40", 2)]),
        ("gpu[32-33]:2,login1:1", [("gpu32", 2), ("gpu33", 2), ("login1", 1)]),
        ("gpu32,gpu33", [("gpu32", 0), ("gpu33", 0)]),
        ("localhost:2", [("localhost", 2)]),
        ("10.0.0.1:4,10.0.0.2:4", [("10.0.0.1", 4), ("10.0.0.2", 4)]),
        (
            "x3006c0s13b1n0.hsn.cm.polaris.alcf.anl.gov:4",
            [("x3006c0s13b1n0.hsn.cm.polaris.alcf.anl.gov", 4)],
        ),
    ],
)
def test_hosts_of_an_option(text: str, hosts: list[tuple[str, int]]) -> None:
    assert parse_hosts(text) == tuple(Host(*each) for each in hosts)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not the name of a host"),
        ("gpu32:4,", "not the name of a host"),
        ("gpu32:4,gpu32:4", "gpu32 is listed twice"),
        ("gpu[32-33]:4,gpu33:4", "gpu33 is listed twice"),
        ("gpu32:", "not a number of slots"),
        ("gpu32:0", "not a number of slots"),
        ("gpu32:four", "not a number of slots"),
        ("gpu32:٤", "not a number of slots"),
        ("gpu32:99999", "not a number of slots"),
        ("gpu32:4,gpu33", "some hosts have slots"),
        ("::1", "not a number of slots"),
        ("localhost:2,gpu33:2", "different host to each"),
        ("gpu33:2,127.0.0.1:2", "different host to each"),
        ("-oProxyCommand=x:2", "not the name of a host"),
        ("gpu32;reboot:2", "not the name of a host"),
        ("$(reboot):2", "not the name of a host"),
        ("gpu32\n:2", "not the name of a host"),
        ("gpu[32-", "not the name of a host"),
        ("gpu[33-32]:2", "not a range"),
        ("gpu[a-b]:2", "not a list of numbers"),
        ("n" * 300 + ":1", "not the name of a host"),
    ],
)
def test_wrong_hosts(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        parse_hosts(text)
    assert caught.value.remedy
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu[32-33,40]", "gpu32 gpu33 gpu40"),
        ("gpu32", "gpu32"),
        ("n[008-011],login1", "n008 n009 n010 n011 login1"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("taurusml[3,5-6]-ib", "taurusml3-ib taurusml5-ib taurusml6-ib"),
    ],
)
def test_lists_of_slurm(text: str, names: str) -> None:
    assert expand(text) == tuple(names.split())


@pytest.mark.parametrize("text", ["n[0-99999999]", "a[1-999]b[1-999]", "n[1-15000],m[1-15000]"])
def test_a_list_without_end(text: str) -> None:
    with pytest.raises(UsageError, match=f"more than {MOST_HOSTS}|not a range"):
        expand(text)


@given(st.sets(st.integers(0, 500), min_size=1), st.integers(1, 5))
def test_expansion_keeps_each_number_and_its_width(numbers: set[int], width: int) -> None:
    written = [str(number).zfill(width) for number in sorted(numbers)]
    assert expand(f"gpu[{','.join(written)}]") == tuple(f"gpu{each}" for each in written)


@given(st.text(max_size=40))
def test_whatever_is_written_is_hosts_or_an_error(text: str) -> None:
    try:
        hosts = parse_hosts(text)
    except UsageError:
        return
    assert hosts
    assert all(
        host.name.isascii() and not set(host.name) & set(" ;$'\"`\n\\|&<>()") for host in hosts
    )


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a\nb\n", [("a", 0), ("b", 0)]),
        ("a\na\nb\nb\n", [("a", 2), ("b", 2)]),
        ("a slots=4\nb slots=2 max_slots=8\n", [("a", 4), ("b", 2)]),
        ("a:4\nb:4\n", [("a", 4), ("b", 4)]),
        ("# hosts\n\na  # first\nb\n", [("a", 0), ("b", 0)]),
        (
            "x3006c0s13b1n0.hsn.cm.polaris.alcf.anl.gov\r\n",
            [("x3006c0s13b1n0.hsn.cm.polaris.alcf.anl.gov", 0)],
        ),
    ],
)
def test_hostfiles(text: str, hosts: list[tuple[str, int]]) -> None:
    assert parse_hostfile(text, "f") == tuple(Host(*each) for each in hosts)


@pytest.mark.parametrize(
    "text", ["", "# none\n", "a\n$(id)\n", "a slots=x\n", "::1\n", "a\nlocalhost\n"]
)
def test_wrong_hostfiles(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_hostfile(text, "hosts.txt")
    assert caught.value.where.startswith("hosts.txt")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 60))
def test_ranks_are_spread_evenly(slots: list[int], ranks: int) -> None:
    ranks = min(ranks, sum(slots))
    hosts = tuple(Host(f"n{number}", each) for number, each in enumerate(slots))
    spread = {host.name: host.slots for host in distribute(hosts, ranks)}
    assert sum(spread.values()) == ranks
    assert all(0 < spread[host.name] <= host.slots for host in hosts if host.name in spread)
    # No host could take one from another that has two more.
    for host in hosts:
        taken = spread.get(host.name, 0)
        assert taken == host.slots or max(spread.values()) - taken <= 1
