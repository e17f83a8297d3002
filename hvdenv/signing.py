"""Signatures by ssh-keygen (OpenSSH 8.2 or newer): hvdenv itself reads no key."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdenv.command import Command
from hvdenv.errors import StepError
from hvdenv.reading import KEY, read_file
from hvdenv.runner import Runner

# What is signed for another purpose is no signature here.
WHEEL, LOCK = "hvdenv-wheel", "hvdenv-lock"
SECONDS = 60.0


def sign(text: bytes, key: str, runner: Runner, namespace: str = WHEEL) -> bytes:
    """The signature of a text.

    Args:
        text: what is signed.
        key: file of the private key, or of the public one if an agent holds the private one.
        runner: runs ssh-keygen.
        namespace: what it is signed for.

    Raises:
        StepError: it does not sign.
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
                remedy="a key with a passphrase has to be in the agent (ssh-add); name the file of"
                " its public key then",
            )
        return read_file(signature, KEY).data


def refusal(
    text: bytes, signature: bytes, signers: Path, runner: Runner, namespace: str = WHEEL
) -> str:
    """Why a signature does not count; empty if it does.

    Args:
        text: what is signed.
        signature: as ssh-keygen makes it.
        signers: allowed signers, as ssh-keygen reads them.
        runner: runs ssh-keygen.
        namespace: what it has to be signed for.
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
            # What it complains of comes before what it has found.
            verify = ("ssh-keygen", "-Y", "verify", "-n", namespace, "-I", lines[-1], *common)
            outcome = runner.run(Command(verify, timeout=SECONDS, stdin=str(path)))
        except StepError as error:
            return error.message
    said = " ".join(outcome.output.split())
    return "" if outcome else f"its signature is not good: {said}"


@contextmanager
def _file(text: bytes) -> Iterator[Path]:
    """A text as a file that nobody else can get at."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="hvdenv-") as folder:
        path = Path(folder) / "text"
        path.write_bytes(text)
        yield path
