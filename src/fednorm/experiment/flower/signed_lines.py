"""Messages from the ServerApp to `submit`, as signed lines in the log of the run.

The log is the only way from a ServerApp to the machine that submitted the run (Flower 1.41 has
events for agents alone), and nodes can write into it: what they report as an error is logged, and
in a simulation all that they print. A secret in the run's configuration would not help: nodes get
it. So the ServerApp makes a key and tells the public half in the first marked line, before it
sends anything to a node; later lines count only with a signature by that key. A line has a number,
so that none counts twice.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import BaseModel, ConfigDict, ValidationError

from fednorm.errors import ConfigError
from fednorm.experiment.results import Event, RunResult

_MARK = "fednorm> "
_PARTS = 3  # number, signature, content


class AppMessage(BaseModel):
    """What a ServerApp says; one of its fields is set, or a model with its checksum."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    error: str | None = None
    event: Event | None = None
    result: RunResult | None = None
    model: str | None = None
    sha256: str | None = None


@dataclass
class LineWriter:
    """Prints the messages of a ServerApp; the first line is its public key."""

    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    count: int = 0

    def __post_init__(self) -> None:
        self._print(self.key.public_key().public_bytes_raw().hex())

    def send(self, **content: Any) -> None:
        """Print a message of plain values with the next number."""
        self.count += 1
        body = json.dumps(content)  # with NaN, which pydantic reads
        signature = self.key.sign(f"{self.count} {body}".encode()).hex()
        self._print(f"{self.count} {signature} {body}")

    @staticmethod
    def _print(text: str) -> None:
        print(_MARK + text, flush=True)  # noqa: T201 (Flower carries it to the user)


@dataclass
class LineReader:
    """Reads the log of a run and believes its ServerApp alone."""

    key: Ed25519PublicKey | None = None
    last: int = 0
    ignored: int = 0  # marked lines without a right signature

    def read(self, line: str) -> AppMessage | None:
        """Return the message in a line of the log, if it is one of the ServerApp."""
        _, mark, text = line.rstrip("\r\n").partition(_MARK)
        if not mark:
            return None
        if self.key is None:
            self._learn_key(text)
            return None
        parts = text.split(" ", maxsplit=_PARTS - 1)
        if len(parts) < _PARTS or not self._is_signed(*parts):
            self.ignored += 1
            return None
        number, _, body = parts
        self.last = int(number)
        try:
            return AppMessage.model_validate_json(body, strict=True)
        except ValidationError as error:
            where = ".".join(str(part) for part in error.errors()[0]["loc"])
            raise ConfigError(
                f"the ServerApp sends a message whose {where or 'content'} this version of fednorm "
                "cannot read; install the same version on all machines."
            ) from None

    def _learn_key(self, text: str) -> None:
        try:
            self.key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))
        except ValueError:
            raise ConfigError(
                "the ServerApp does not sign its messages; install the same version of fednorm on "
                "all machines."
            ) from None

    def _is_signed(self, number: str, signature: str, body: str) -> bool:
        try:
            self.key.verify(bytes.fromhex(signature), f"{number} {body}".encode())  # type: ignore[union-attr]
        except (InvalidSignature, ValueError):
            return False
        return int(number) > self.last
