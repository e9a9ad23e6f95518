"""Run the notebooks of docs/notebooks and store what they print and plot.

    python docs/_site/run_notebooks.py

Cells run in order in a new process, as "restart and run all" would; a last expression is shown, and
so are open figures. Outputs are stored as Jupyter stores them, without times or counters that would
differ from run to run. Needs neither Jupyter nor a kernel.
"""

import ast
import base64
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one cell and return its outputs."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    written, value = io.StringIO(), None
    with contextlib.redirect_stdout(written):
        exec(compile(tree, "cell", "exec"), names)  # noqa: S102 (the notebook's own code)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)  # noqa: S307
    outputs: list[dict[str, Any]] = []
    if written.getvalue():
        text = written.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    for number in plt.get_fignums():
        image = io.BytesIO()
        plt.figure(number).savefig(image, format="png", dpi=80, metadata={"Software": None})
        plt.close(number)
        data = {"image/png": base64.b64encode(image.getvalue()).decode()}
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
        value = None
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        outputs.append(
            {"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"}
        )
    return outputs


def run_notebook(path: Path) -> dict[str, Any]:
    """Run all cells of a notebook in this process, and return it with their outputs."""
    plt.switch_backend("agg")
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = run_cell("".join(cell["source"]), names)
            cell["execution_count"] = None
    return notebook


def run_apart(path: Path) -> dict[str, Any]:
    """Run a notebook in a new process and an empty folder, and return it with its outputs."""
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [sys.executable, "-W", "error", Path(__file__).resolve(), path.resolve()],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if found.returncode:
        raise RuntimeError(f"{path.name} fails:\n{found.stderr}")
    return json.loads(found.stdout)


def main() -> None:
    """Run one notebook and print it, or run all and store their outputs."""
    if len(sys.argv) > 1:
        print(json.dumps(run_notebook(Path(sys.argv[1]))))
        return
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        text = json.dumps(run_apart(path), indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
