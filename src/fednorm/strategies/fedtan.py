"""FedTAN: statistics synchronised over clients, layer by layer, forward and backward.

Wang, Shi and Chang, "Why Batch Normalization Damage Federated Learning on Non-IID Data?", 2023,
arXiv:2301.02982.

Client: at each of the L layers it sends its batch mean and receives the global one, sends the mean
squared deviation from it and receives the global variance, and in the backward pass sends the
gradients with respect to both and receives their mean.

Server: averages in each exchange, then aggregates the model. That makes 3L+1 exchanges a round, or
2L+1 with `shared_message`, where mean and variance travel together.

With one local step the gradient is that of one machine on the union of the batches, in which a
client's samples weigh what its update weighs: its data in fedavg, its batch in dsgd. With E > 1 the
exchange is made in the first step of a round; steps 2…E are ordinary local BatchNorm.

Deviations: the authors' clients are equal and all averages plain. Their running statistics follow
the exchanged ones in the first step and each client's own batches in steps 2…E, and are averaged,
the variance too: `statistics="average"`. By default they are pooled here, because an averaged
variance lacks the spread between clients; with E = 1 both are the same up to the factor n/(n-1) of
an unbiased variance, in which n are the values of all clients, or of one.
"""

from dataclasses import dataclass
from typing import ClassVar

from fednorm.core.layer import NormRule, Statistics
from fednorm.core.messages import Broadcast
from fednorm.nn.sync_norm import make_sync_rule
from fednorm.registry import param
from fednorm.strategies.base import SharedStatisticsStrategy


@dataclass(frozen=True)
class FedTAN(SharedStatisticsStrategy):
    """BatchNorm over all clients' batches at once, at the price of many exchanges."""

    mergeable_batches: ClassVar[bool] = True
    exchanges: ClassVar[bool] = True

    statistics: Statistics = param(
        "pool",
        "'pool' merges the clients' moments; 'average' averages their running statistics, as the "
        "authors do, and leaves out the clients' spread in steps 2 to E",
    )
    shared_message: bool = param(
        default=False, help="mean and variance in one exchange: 2L+1 a round instead of 3L+1"
    )

    def rule(self, broadcast: Broadcast) -> NormRule:  # noqa: ARG002 (the same in all rounds)
        """Normalise with statistics synchronised over clients."""
        average = self.statistics == "average"
        return make_sync_rule(shared_message=self.shared_message, follow=average)
