"""The network and the data: ten clients with one handwritten digit each (γ = 0)."""

import torch
from torch import Tensor, nn

from fednorm import partition
from fednorm.data import load_dataset

DATA = load_dataset("digits", seed=0)


class Net(nn.Sequential):
    """Two hidden layers with BatchNorm."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(),
            *(nn.Linear(64, 64), nn.ReLU(), nn.BatchNorm1d(64)),
            *(nn.Linear(64, 64), nn.ReLU(), nn.BatchNorm1d(64)),
            nn.Linear(64, 10),
        )


def client_data(client: int, clients: int) -> tuple[Tensor, Tensor]:
    """Return a client's own images and labels."""
    own = torch.from_numpy(partition("gamma=0", DATA.y, clients=clients, seed=0)[client])
    return DATA.x[own], DATA.y[own]


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Return the share of right answers on the 400 held-out images of all digits."""
    return float((model(DATA.x_test).argmax(1) == DATA.y_test).double().mean())
