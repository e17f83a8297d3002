"""Signatures by ssh-keygen (OpenSSH 8.2 or newer); hvdenv itself reads no private key."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdenv.command import Command
from hvdenv.errors import StepError
from hvdenv.reading import KEY, read_file
from hvdenv.runner import Runner

# Namespaces: a signature made for another purpose is not accepted.
WHEEL, LOCK, IMAGE = "hvdenv-wheel", "hvdenv-lock", "hvdenv-image"
SECONDS = 60.0


def sign(text: bytes, key: str, runner: Runner, namespace: str = WHEEL) -> bytes:
    """The signature of a text.

    Args:
        key: file of the private key, or of the public one if an agent holds the private one.

    Raises:
        StepError: ssh-keygen does not sign.
    """
    with _file(text) as path:
        command = Command(
            ("ssh-keygen", "-Y", "sign", "-f", key, "-n", namespace, str(path)), timeout=SECONDS
        )
        outcome = runner.run(command)
        signature = path.with_name(f"{path.name}.sig")
        if not outcome or not signature.exists():
            raise StepError(
                "ssh-keygen does not sign with this key",
                where=key,
                detail=outcome.tail(5),
                remedy="if the key has a passphrase, load it into the agent (ssh-add) and name the"
                " file of its public key",
            )
        return read_file(signature, KEY).data


def refusal(
    text: bytes, signature: bytes, signers: Path, runner: Runner, namespace: str = WHEEL
) -> str:
    """Why a signature is not accepted; empty if it is.

    Args:
        signature: in the format of ssh-keygen.
        signers: file of allowed signers, in the format of ssh-keygen.
    """
    with _file(text) as path:
        made = path.with_name("signature")
        made.write_bytes(signature)
        common = ("-s", str(made), "-f", str(signers))
        try:
            found = runner.run(
                Command(("ssh-keygen", "-Y", "find-principals", *common), timeout=SECONDS)
            )
            lines = found.output.splitlines()
            if not found or not lines:
                return f"it is not signed by a key that is valid in {signers}"
            # Warnings are printed before the principals.
            verify = ("ssh-keygen", "-Y", "verify", "-n", namespace, "-I", lines[-1], *common)
            outcome = runner.run(Command(verify, timeout=SECONDS, stdin=str(path)))
        except StepError as error:
            return error.message
    return "" if outcome else f"its signature is invalid: {' '.join(outcome.output.split())}"


@contextmanager
def _file(text: bytes) -> Iterator[Path]:
    """A text as a file that no other user can access."""
    with tempfile.TemporaryDirectory(prefix="hvdenv-") as folder:
        path = Path(folder) / "text"
        path.write_bytes(text)
        yield path
