"""What goes wrong in a federation: clients that lie, clients that vanish, too few good replies.

Everything is drawn from (seed, round, attempt), so that a run that is stopped goes on the same.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from fednorm.attacks import Adversary
from fednorm.core.random_streams import Stream
from fednorm.core.types import ClientId
from fednorm.engines.clients import Clients
from fednorm.engines.kept import LIMIT

ATTEMPTS = 5  # at one round, before a run gives up


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under which a run is simulated; the default is that all clients are honest and answer."""

    adversary: Adversary | None = None
    dropout: float = 0.0  # the probability with which a client vanishes in mid-round
    minimum_replies: int = 1  # good ones that a round needs
    seed: int = 0
    personal_bytes: int = LIMIT  # of what clients keep, that are held in memory; more goes to disk

    @property
    def usual(self) -> bool:
        """Whether nothing goes wrong but by itself."""
        return self.adversary is None and not self.dropout and self.minimum_replies <= 1

    @property
    def byzantine(self) -> frozenset[ClientId]:
        """Return who lies."""
        return self.adversary.clients if self.adversary else frozenset()

    def asked(
        self, clients: Clients, round_: int, attempt: int, before: Collection[ClientId]
    ) -> list[ClientId]:
        """Return who takes part: in later attempts others, as far as there are others."""
        first = clients.participants(round_)
        if not attempt:
            return first
        rng = np.random.default_rng([self.seed, round_, attempt, Stream.RETRY_CLIENTS])
        drawn = rng.permutation(clients.all()).tolist()
        fresh_first = sorted(drawn, key=lambda client: client in before)
        return sorted(fresh_first[: len(first)])

    def answering(self, asked: Sequence[ClientId], round_: int, attempt: int) -> list[ClientId]:
        """Return who does not vanish."""
        if not self.dropout:
            return list(asked)
        rng = np.random.default_rng([self.seed, round_, attempt, Stream.CLIENT_DROPOUT])
        stays = rng.random(len(asked)) >= self.dropout
        return [client for client, here in zip(asked, stays.tolist(), strict=True) if here]

    def may_repeat(self, clients: Clients, attempt: int, tried: Collection[ClientId]) -> bool:
        """Return whether another attempt could end otherwise, and is not one too many."""
        others = any(client not in tried for client in clients.all())
        return attempt + 1 < ATTEMPTS and (others or self.dropout > 0)


USUAL = Conditions()
