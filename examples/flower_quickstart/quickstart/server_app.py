"""What runs at the server."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

import fednorm.flower
from quickstart.task import Net, accuracy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds and test the global model after each."""
    torch.manual_seed(0)
    model = Net()
    strategy = fednorm.flower.NormStrategy(
        str(context.run_config["strategy"]), model=model, fraction_evaluate=0.0
    )

    def test(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        del server_round
        model.load_state_dict(arrays.to_torch_state_dict(), strict=True)
        return MetricRecord({"accuracy": accuracy(model.eval())})

    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
        evaluate_fn=test,
    )
