"""The network, the data, and an ordinary training loop: nothing in here is about Flower."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fednorm import partition
from fednorm.data import load_dataset

DATA = load_dataset("digits", seed=0)
SKEW = "gamma=0"  # ten clients have one digit each; "dirichlet=0.3" and "iid" differ less


class Block(nn.Module):
    """Two convolutions with BatchNorm, and a shortcut around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride != 1:
            project = nn.Conv2d(before, after, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of a batch."""
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class Net(nn.Sequential):
    """A small ResNet: convolution, BatchNorm, ReLU."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(Block(16, 16, 1), Block(16, 32, 2)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
        )


def client_data(client: int, clients: int, *, held_out: bool = False) -> tuple[Tensor, Tensor]:
    """Return a client's own images and labels: every fifth is held out for its evaluation."""
    own = torch.from_numpy(partition(SKEW, DATA.y, clients=clients, seed=0)[client])
    chosen = own[(torch.arange(len(own)) % 5 == 0) == held_out]
    return DATA.x[chosen], DATA.y[chosen]


def fit(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]]
) -> float:
    """Take one step for each batch; return the last loss."""
    last = 0.0
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model.train()(x), y)
        loss.backward()
        optimizer.step()
        last = loss.item()
    return last


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor = DATA.x_test, y: Tensor = DATA.y_test) -> float:
    """Return the share of right answers; without other images on the 400 held-out ones."""
    return float((model.eval()(x).argmax(1) == y).double().mean())
