"""The interface of a training algorithm: local training, and the server's update."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeAlias

from torch import Tensor, nn

from fednorm.core.messages import Batches, Broadcast, ServerState
from fednorm.core.types import Clip, Tensors

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LocalWork:
    """Everything a client's training needs; the model holds the received weights."""

    model: Callable[[Tensor], Tensor]
    loss: Loss
    shared: Mapping[str, nn.Parameter]  # those that learn in this round
    personal: Mapping[str, nn.Parameter]
    batches: Batches
    broadcast: Broadcast
    optimizer: Tensors  # momentum, or what else this client kept, by parameter
    rates: Mapping[str, float] = field(default_factory=dict)  # times the learning rate; else 1
    clips: Mapping[str, Clip] = field(default_factory=dict)  # of gradients, before each step


@dataclass(frozen=True, slots=True)
class LocalResult:
    """The outcome of a client's local training."""

    update: Tensors  # of the shared parameters
    examples: int  # the client's weight in averages
    loss: float  # mean over the steps
    optimizer: Tensors = field(default_factory=dict)  # that stays with the client
    momentum: Tensors = field(default_factory=dict)  # that the server averages, as `sends` says
    steps: int = 1


@dataclass(frozen=True, slots=True)
class CombinedReplies:
    """What the aggregator made of the replies of a round."""

    update: Tensors
    momentum: Tensors = field(default_factory=dict)
    share: float = 1.0  # of all clients: those that replied
    rounds: int | None = None  # planned
    rates: Mapping[str, float] = field(default_factory=dict)  # as in `LocalWork`


class Algorithm(Protocol):
    """A frozen dataclass; its fields are its hyper-parameters."""

    # A round is one step along the mean of the clients' gradients, weighted by their batches.
    single_step: ClassVar[bool]
    # A client that loses its state trains wrongly from then on; to lose momentum does no harm.
    needs_client_state: ClassVar[bool]

    @property
    def clips_gradients(self) -> bool:
        """Whether a client clips its gradient before a step."""

    @property
    def keeps_state(self) -> bool:
        """Whether clients keep something of shared parameters between rounds, such as momentum."""

    def sends(self, update: Tensors) -> Tensors:
        """Return what clients send with `update`, such as momentum; only its form counts."""

    def find_ranges(self, batches: int) -> Mapping[str, tuple[float, float]]:
        """Return the range of single numbers that clients send, after `batches` batches."""

    def examples(self, batches: Batches, samples: int) -> int:
        """Return a client's weight in averages, in a step on a batch of `samples`."""

    def local(self, work: LocalWork) -> LocalResult:
        """Train on the client's batches of one round."""

    def change(self, state: ServerState, combined: CombinedReplies) -> Tensors:
        """Return the change of weights that the clients propose, linear in the update."""

    def apply(self, state: ServerState, combined: CombinedReplies) -> ServerState:
        """Return the state with new weights, momentum and server optimizer."""
