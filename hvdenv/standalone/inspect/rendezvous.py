"""Report whether the key-value servers of horovodrun accept requests without a signature.

usage: python rendezvous.py

Starts the servers on 127.0.0.1 and sends them what CVE-2024-10190 and CVE-2026-31234 describe,
with values that do nothing when they are unpickled. Prints `@hvdenv-rendezvous PAYLOAD`: JSON in
base64. Runs on Python 3.6 and newer and imports nothing but Horovod.
"""

import base64
import http.client
import importlib
import json
import pickle
import sys
import threading
import traceback
from typing import Any, Dict, List

SECONDS = 2.0
HARMLESS = base64.b64encode(pickle.dumps(({}, b"")))


class Driver:
    """Stands in for the driver of an elastic job: notes that a value was unpickled."""

    def __init__(self) -> None:
        self.unpickled = False

    def register_worker_server(self, *arguments: Any) -> None:
        self.unpickled = True


def status_of_put(server: Any, path: str) -> int:
    """The status with which a server answers an unsigned PUT."""
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    host, port = server.server_address[:2]
    client = http.client.HTTPConnection(host, port, timeout=SECONDS)
    try:
        client.request("PUT", path, HARMLESS)
        return client.getresponse().status
    finally:
        client.close()
        server.shutdown()
        server.server_close()


def accepted() -> List[str]:
    servers = importlib.import_module("horovod.runner.http.http_server")
    elastic = importlib.import_module("horovod.runner.elastic.rendezvous")
    address, found = ("127.0.0.1", 0), []
    driver = Driver()
    handler = elastic.create_rendezvous_handler(driver)
    status_of_put(servers.RendezvousHTTPServer(address, handler, 0), "/worker_addresses/probe:0")
    if driver.unpickled:
        found.append("CVE-2024-10190")
    store = servers.KVStoreHTTPServer(address, servers.KVStoreHandler, 0)
    if status_of_put(store, "/runfunc/func") == 200:
        found.append("CVE-2026-31234")
    return found


def look() -> Dict[str, Any]:
    facts: Dict[str, Any] = {}
    try:
        secret = importlib.import_module("horovod.runner.common.util.secret")
        facts["patched"] = hasattr(secret, "sign_request")
        facts["accepted"] = accepted()
    except Exception as error:
        facts["error"] = "{}: {}".format(type(error).__name__, error)[:500]
        facts["traceback"] = traceback.format_exc()[-2000:]
    return facts


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        sys.path.pop(0)  # this directory: its files must not shadow modules
    payload = base64.b64encode(json.dumps(look()).encode("ascii"))
    print("\n@hvdenv-rendezvous " + payload.decode("ascii"))
