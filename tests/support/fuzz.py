"""Requests to the servers of horovodrun, from somebody without the key of the job.

First those that a rank signed: repeated, changed, and sent to another server. Then random ones. It runs in an environment that has Horovod: python fuzz.py SECONDS SEED MARKER. It ends with 0 if all
servers still work then, and if the file MARKER does not exist, which some of the requests create
where they are unpickled.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import random
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

from horovod.runner.common.util import network, secret
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http.http_client import put_data_into_kvstore, read_data_from_kvstore
from horovod.runner.http.http_server import KVStoreServer, RendezvousServer

HOST, CLIENTS = "127.0.0.1", 4
METHODS = ("GET", "PUT", "DELETE", "HEAD", "POST", "OPTIONS", "X", "", "\0", "PUT" * 400)
PATHS = (
    "/worker_addresses/a:0",
    "/runfunc/func",
    "/rank_and_size/a:0",
    "/global/0",
    "/",
    "//",
    "/a/b/c",
    "/../../etc/passwd",
    "*",
    "http://x/a/b",
    "/a/%00",
    "/" + "a" * 70000,
)
LENGTHS = ("0", "1", "-1", "99999999999", "2147483648", "x", "", "0x10", "\u00b2")
VALUES = ("", "0" * 64, "\xff" * 64, "a" * 70000)


class Payload:
    """Creates a file where it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, (f"open({self.marker!r}, 'w')",)


def http(chance: random.Random, pickled: bytes) -> bytes:
    """A request to a key-value store, somewhat like a real one."""
    body = chance.choice([b"", base64.b64encode(pickled), chance.randbytes(100), bytes(5000)])
    version = chance.choice(["HTTP/1.1", "HTTP/1.0", "HTTP/9.9", "HTTP/x", ""])
    length = chance.choice([str(len(body)), chance.choice(LENGTHS)])
    lines = [f"{chance.choice(METHODS)} {chance.choice(PATHS)} {version}"]
    lines += [f"Content-Length: {length}"] * chance.choice([0, 1, 1, 1, 2])
    for name in (secret.NONCE_HEADER, secret.BODY_HEADER, secret.DIGEST_HEADER):
        hashed = secret.hash_body(body)
        value = chance.choice([*VALUES, chance.randbytes(32).hex(), hashed])
        lines += [f"{name}: {value}"] * chance.choice([0, 1, 1, 2])
    lines += ["Transfer-Encoding: chunked"] * chance.choice([0, 0, 1])
    lines += ["X: y"] * chance.choice([0, 0, 0, 300])
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    return mutated(chance, head + body)


def wire(chance: random.Random, pickled: bytes) -> bytes:
    """A message to a driver or task service, somewhat like a real one."""
    length = chance.choice([len(pickled), -1, 0, 2**31 - 1, chance.getrandbits(20)])
    digest = chance.choice([chance.randbytes(32), secret.compute_digest(b"another", pickled)])
    return mutated(chance, digest + struct.pack("i", length) + pickled)


def mutated(chance: random.Random, data: bytes) -> bytes:
    """The data, cut off or with some other bytes, or as it is."""
    kind = chance.randrange(4)
    if kind == 0:
        return data[: chance.randrange(len(data) + 1)]
    if kind == 1:
        changed = bytearray(data)
        for _ in range(chance.randrange(1, 8)):
            changed[chance.randrange(len(changed))] = chance.getrandbits(8)
        return bytes(changed)
    return data


def send(port: int, data: bytes, *, patient: bool) -> None:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=5) as client:
        client.sendall(data)
        if patient:
            client.shutdown(socket.SHUT_WR)
            while client.recv(65536):
                pass


def answers(port: int, lines: list[str], body: bytes) -> bool:
    """Whether a server accepts a request."""
    with socket.create_connection((HOST, port), timeout=5) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        return client.recv(65536).startswith(b"HTTP/1.0 200")


def check_recorded(port: int, other: int, key: bytes) -> None:
    """A request that a rank signed has an effect once, as it was signed, on its server."""

    def signed(method: str = "PUT", path: str = "/scope/recorded") -> list[str]:
        nonce, hashed = secret.make_secret_key().hex(), secret.hash_body(b"1")
        digest = secret.sign_request(key, method, path, port, nonce, 1, hashed)
        values = {
            secret.NONCE_HEADER: nonce,
            secret.BODY_HEADER: hashed,
            secret.DIGEST_HEADER: digest,
        }
        headers = [f"{name}: {value}" for name, value in values.items()]
        return [f"{method} {path} HTTP/1.1", *headers, "Content-Length: 1"]

    first, *headers = signed()
    for line in (
        "DELETE /scope/recorded HTTP/1.1",
        "PUT /scope/other HTTP/1.1",
        "GET /a/b HTTP/1.1",
    ):
        assert not answers(port, [line, *headers], b"1"), line
    assert not answers(port, [first, *headers[:-1], "Content-Length: 2"], b"12")
    assert not answers(port, [first, "Content-Length: 2", *headers], b"12")
    assert not answers(other, [first, *headers], b"1")
    assert not answers(port, signed(), b"2")
    assert answers(port, [first, *headers], b"1")
    assert not answers(port, [first, *headers], b"1")


def main(seconds: float, seed: int, marker: str) -> None:
    key, pickled = secret.make_secret_key(), pickle.dumps(Payload(marker))
    handler = create_rendezvous_handler(None)
    pickle.loads(pickled)
    os.remove(marker)  # so the payload works
    rendezvous, elastic = RendezvousServer(0, key), RendezvousServer(0, key)
    store = KVStoreServer(0, key)
    stores = [rendezvous.start(host=HOST), elastic.start(handler, HOST), store.start_server(HOST)]
    for port, another in ((stores[0], stores[1]), (stores[2], stores[0])):
        check_recorded(port, another, key)
    service = network.BasicService("fuzzed", key, {"lo"})
    targets: list[tuple[int, Callable[[random.Random, bytes], bytes]]]
    targets = [*((port, http) for port in stores), (service.get_port(), wire)]
    end, sent = time.monotonic() + seconds, [0] * CLIENTS

    def client(number: int) -> None:
        chance = random.Random(f"{seed} {number}")
        while time.monotonic() < end:
            port, make = chance.choice(targets)
            send(port, make(chance, pickled), patient=chance.random() < 0.9)
            sent[number] += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    # socketserver prints a traceback for each message that it refuses.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for port in stores:
        put_data_into_kvstore(HOST, port, "scope", "key", "value", key)
        assert read_data_from_kvstore(HOST, port, "scope", "key", key) == "value"
    assert network.BasicClient("fuzzed", service.addresses(), key, 0, attempts=1).addresses()
    assert not os.path.exists(marker), f"a request ran code; seed {seed}"
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        f"{sum(sent)} requests in {seconds:g} s, {threading.active_count()} threads, {largest} MiB"
    )


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
