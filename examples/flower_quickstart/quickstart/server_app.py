"""What runs at the server."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

import fednorm.flower
from quickstart.task import Net, accuracy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds, and test the global model after each."""
    config = context.run_config
    torch.manual_seed(int(config["seed"]))
    strategy = fednorm.flower.NormStrategy(str(config["strategy"]), model=Net())

    def test(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        del server_round, arrays  # strategy.model holds them, in the layers of the strategy
        return MetricRecord({"accuracy": accuracy(strategy.model)})

    strategy.start(grid=grid, num_rounds=int(config["num-server-rounds"]), evaluate_fn=test)
