"""What runs at the coordinator, which has no images."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file

import fednorm.flower
from fednorm.engines.evaluation import is_personal
from hospital.task import build_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds; save the global model, if there is one."""
    config = context.run_config
    strategy = fednorm.flower.NormStrategy(str(config["strategy"]), model=build_model(config))
    strategy.start(grid=grid, num_rounds=int(config["num-server-rounds"]))
    if config["output"] and not is_personal(
        strategy.task
    ):  # otherwise there are only hospitals' own
        output = Path(str(config["output"]))
        output.mkdir(parents=True, exist_ok=True)
        save_file(strategy.model.state_dict(), output / "global.safetensors")
