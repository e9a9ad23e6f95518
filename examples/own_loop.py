"""Federated training with a loop of your own: fednorm does the normalization, you do the rest.

Run it with `python examples/own_loop.py`; it takes a few seconds and prints the accuracy of the
global model on handwritten digits, although every client has only one of them.
"""

import torch
from torch import nn

import fednorm
from fednorm.data import load_dataset

CLIENTS, ROUNDS, BATCH = 10, 150, 20
torch.set_num_threads(1)  # layers as small as these are faster on one thread

data = load_dataset("digits", seed=0)
parts = fednorm.partition("gamma=0", data.y, clients=CLIENTS, seed=0)
model = nn.Sequential(
    nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 10)
)
task = fednorm.Task.build(
    model, fednorm.create_strategy("fbn"), fednorm.create_algorithm("dsgd", lr=0.1), rounds=ROUNDS
)
generator = torch.Generator().manual_seed(0)


def draw(client: int) -> fednorm.Batches:
    """Draw one mini-batch of a client's own data."""
    own = torch.from_numpy(parts[client])
    picked = own[torch.randperm(len(own), generator=generator)[:BATCH]]
    return fednorm.Batches(client, [(data.x[picked], data.y[picked])], examples=len(own))


state = task.initial_state
client_states = {client: fednorm.ClientState() for client in range(CLIENTS)}
for _ in range(ROUNDS):
    received = fednorm.broadcast(task, state)  # send this to the clients
    replies = []
    for client in range(CLIENTS):  # this part runs on the client's machine
        reply, client_states[client] = fednorm.client_round(
            task, received, client_states[client], draw(client)
        )
        replies.append(reply)
    state = fednorm.server_round(task, state, replies)  # and this on the server again

trained = fednorm.fold(fednorm.export(task, state))
right = (trained(data.x_test).argmax(1) == data.y_test).double().mean()
print(f"accuracy after {ROUNDS} rounds: {right:.1%}")
