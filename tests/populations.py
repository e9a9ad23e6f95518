"""Clients that hold data, and plain weighted moments: what oracles about populations share."""

from dataclasses import dataclass, field

import torch

from fednorm.core.messages import Batches


@dataclass(frozen=True)
class Population:
    """Clients with so many samples each, in batches of so many, for so many local steps.

    How much a client holds says nothing about its batches: a client with 90 samples may take three
    steps of 4. Client i's samples have mean 2i and deviation 1 + i. The last step may be smaller.
    """

    holds: tuple[int, ...] = (90, 6, 24)
    batch: tuple[int, ...] = (4, 4, 4)
    steps: tuple[int, ...] = (3, 3, 3)
    shapes: tuple[tuple[int, ...], ...] = ((1, 8, 8),) * 3
    classes: int = 4
    last: tuple[int, ...] = ()  # the size of each client's last batch, if it is another
    absent: dict = field(default_factory=dict)  # round -> clients that do not take part
    again: bool = False  # whether all rounds draw the same batches

    @property
    def clients(self):
        return len(self.holds)

    def all(self):
        return list(range(self.clients))

    def participants(self, round_):
        return [c for c in self.all() if c not in self.absent.get(round_, ())]

    def lengths(self, client):
        full = [self.batch[client]] * self.steps[client]
        return tuple([*full[:-1], self.last[client]] if self.last else full)

    def batches(self, client, round_):
        generator = torch.Generator().manual_seed(1000 * (1 if self.again else round_) + client)
        lengths = self.lengths(client)
        steps = [self._batch(client, size, generator) for size in lengths]
        return Batches(
            client,
            steps,
            self.holds[client],
            seed=round_ * 100 + client,
            all_data=self.all_batches(client).steps,
            batch_sizes=lengths,
        )

    def all_batches(self, client):
        """All of a client's data, in batches of unequal sizes."""
        generator = torch.Generator().manual_seed(500_000 + client)
        left, size, steps = self.holds[client], 4 + client, []
        while left > 0:
            take = left if left <= size + 1 else size  # a single sample is no batch
            steps.append(self._batch(client, take, generator))
            left -= take
        return Batches(client, steps, self.holds[client])

    def test(self, client):
        return self.batches(client, 999).steps[:1]

    def _batch(self, client, size, generator):
        shape = (size, *self.shapes[client])
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        y = torch.randint(self.classes, (size,), generator=generator)
        return x * (1 + client) + 2 * client, y


def flat(x):
    """Return a layer's input as channels x values."""
    return x.detach().transpose(0, 1).flatten(1)


def weighted(values, weights):
    """Return mean and biased variance of values (channels x values) that weigh unequally."""
    share = weights / weights.sum()
    mean = (values * share).sum(1)
    return mean, ((values - mean[:, None]) ** 2 * share).sum(1)


def population(steps_of, weight_of, beta):
    """Return N, mean and biased variance over clients whose summaries weigh what they stand for.

    `steps_of[i]` are the values (channels x values) that client i's layer saw, step by step; a
    value of step s of E weighs β(1-β)^(E-s). All values of client i together weigh `weight_of[i]`.
    N is how many values were seen in a step, the mean over steps with these weights.
    """
    values, weights, seen = [], [], 0.0
    for steps, total in zip(steps_of, weight_of, strict=True):
        last = len(steps)
        own = [
            torch.full((x.shape[1],), beta * (1 - beta) ** (last - s), dtype=torch.float64)
            for s, x in enumerate(steps, 1)
        ]
        own = torch.cat(own)
        weights.append(own / own.sum() * total)
        values.append(torch.cat(steps, 1))
        shares = [beta * (1 - beta) ** (last - s) for s in range(1, last + 1)]
        seen += sum(a * x.shape[1] for a, x in zip(shares, steps, strict=True)) / sum(shares)
    return seen, *weighted(torch.cat(values, 1), torch.cat(weights))


def follow(mean, var, found, share):
    """Return the running mean and (unbiased) variance after they moved by `share`."""
    n, new_mean, new_var = found
    return (
        (1 - share) * mean + share * new_mean,
        (1 - share) * var + share * new_var * n / (n - 1),
    )
