"""Submit an experiment to a running SuperLink and bring its results back.

What is sent is a Flower app of a few lines with the experiment as its configuration; fednorm itself
must be installed on the SuperLink's and the SuperNodes' machines.

Results come back as signed lines in the log of the run, the only way from a ServerApp to the
machine that submitted it (Flower 1.41 has events for agents alone). Nodes can write into it: what
they report as an error is logged, and in a simulation all that they print. A secret in the run's
configuration would not help: nodes get it. So the ServerApp makes a key and tells the public half
in the first marked line, before it sends anything to a node; later lines count only with a
signature by that key. A line has a number, so that none counts twice.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from fednorm.engines.flower import require_flower
from fednorm.errors import ConfigError, MissingFlowerError
from fednorm.experiment.callbacks import may_end_runs
from fednorm.experiment.callbacks.base import UNWATCHED, Monitor, RunStart, follow
from fednorm.experiment.job import CheckpointPolicy, lock_folder, log
from fednorm.experiment.results import Comparison, Event, RunResult
from fednorm.experiment.run_folder import MetricsFile, open_folder, run_folder, save_run
from fednorm.experiment.schema.config import Experiment
from fednorm.experiment.schema.specs import StrategySpec
from fednorm.system import describe_environment

with require_flower("engine 'flower'"):
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

_SERVER = "from fednorm.experiment.flower.server_app import server as app\n\n__all__ = ['app']\n"
_CLIENT = "from fednorm.experiment.flower.nodes import client as app\n\n__all__ = ['app']\n"
_STARTED = re.compile(r"started run (\d+)")
_SAVING = CheckpointPolicy()
_MARK = "fednorm> "
_PARTS = 3  # number, signature, content


class AppMessage(BaseModel):
    """What a ServerApp says; one of its fields is set, or a model with its checksum."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    error: str | None = None
    event: Event | None = None
    result: RunResult | None = None
    model: str | None = None
    sha256: str | None = None


@dataclass
class LineWriter:
    """Prints the messages of a ServerApp; the first line is its public key."""

    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    count: int = 0

    def __post_init__(self) -> None:
        self._print(self.key.public_key().public_bytes_raw().hex())

    def send(self, **content: Any) -> None:
        """Print a message of plain values with the next number."""
        self.count += 1
        body = json.dumps(content)  # with NaN, which pydantic reads
        signature = self.key.sign(f"{self.count} {body}".encode()).hex()
        self._print(f"{self.count} {signature} {body}")

    @staticmethod
    def _print(text: str) -> None:
        print(_MARK + text, flush=True)  # noqa: T201 (Flower carries it to the user)


@dataclass
class LineReader:
    """Reads the log of a run and believes its ServerApp alone."""

    key: Ed25519PublicKey | None = None
    last: int = 0
    ignored: int = 0  # marked lines without a right signature

    def read(self, line: str) -> AppMessage | None:
        """Return the message in a line of the log, if it is one of the ServerApp."""
        _, mark, text = line.rstrip("\r\n").partition(_MARK)
        if not mark:
            return None
        if self.key is None:
            self._learn_key(text)
            return None
        parts = text.split(" ", maxsplit=_PARTS - 1)
        if len(parts) < _PARTS or not self._is_signed(*parts):
            self.ignored += 1
            return None
        number, _, body = parts
        self.last = int(number)
        try:
            return AppMessage.model_validate_json(body, strict=True)
        except ValidationError as error:
            where = ".".join(str(part) for part in error.errors()[0]["loc"])
            raise ConfigError(
                f"the ServerApp sends a message whose {where or 'content'} this version of fednorm "
                "cannot read; install the same version on all machines."
            ) from None

    def _learn_key(self, text: str) -> None:
        try:
            self.key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))
        except ValueError:
            raise ConfigError(
                "the ServerApp does not sign its messages; install the same version of fednorm on "
                "all machines."
            ) from None

    def _is_signed(self, number: str, signature: str, body: str) -> bool:
        try:
            self.key.verify(bytes.fromhex(signature), f"{number} {body}".encode())  # type: ignore[union-attr]
        except (InvalidSignature, ValueError):
            return False
        return int(number) > self.last


@dataclass(frozen=True)
class SuperLink:
    """Where to submit: `host:port`, and the certificate by which it is known."""

    address: str
    root_certificates: Path | None = None

    def settings(self) -> dict[str, Any]:
        """Return its entry in Flower's configuration."""
        if self.root_certificates is None:
            return {"address": self.address, "insecure": True}
        found = self.root_certificates.expanduser().resolve()
        if not found.is_file():
            raise ConfigError(f"there is no certificate {str(found)!r}.")
        return {"address": self.address, "root-certificates": str(found)}


def submit(
    experiment: Experiment,
    superlink: SuperLink,
    folder: Path,
    monitor: Monitor = UNWATCHED,
    saving: CheckpointPolicy = _SAVING,
) -> Comparison:
    """Run an experiment on a SuperLink, or the rest of it, and record its results in a folder."""
    monitor = _follow_here(experiment, monitor)
    results: list[RunResult] = []
    with lock_folder(folder):
        open_folder(folder, experiment)
        for entry in experiment.strategies:
            for seed in experiment.seeds:
                before = run_folder(folder, entry, seed) / "metrics.jsonl"
                before.unlink(missing_ok=True)
        for message in _read_messages(experiment, superlink, saving):
            if message.error is not None:
                raise ConfigError(f"the SuperLink's side says: {_clean(message.error)}")
            if message.event is not None:
                if message.event.round == 1:  # a run that was resumed there is told from its start
                    monitor.start(_describe_start(message.event, experiment, folder))
                _write_event(message.event, experiment, folder)
                monitor.report(message.event)
            if message.model is not None:
                told = _clean(message.model), _clean(str(message.sha256))
                log.info("model at the SuperLink: %s, SHA-256 %s", *told)
            if message.result is not None:
                results.append(_record_result(message.result, experiment, folder))
                monitor.end(results[-1])
    expected = len(experiment.strategies) * len(experiment.seeds)
    if len(results) < expected:
        raise ConfigError(
            f"the SuperLink made {len(results)} of {expected} runs; its log says why. Is fednorm "
            "installed where it and its SuperNodes run? If it was stopped, start it and give the "
            "same command again: the experiment continues."
        )
    content = experiment.model_dump(mode="json", exclude_none=True)
    return Comparison(content, describe_environment(), tuple(results))


def _follow_here(experiment: Experiment, monitor: Monitor) -> Monitor:
    """Return a monitor with the callbacks of the experiment; refuse what a SuperLink cannot do."""
    if experiment.tune:
        raise ConfigError(
            "a SuperLink does not tune, which needs a part of the training samples at the server; "
            "leave tune out, and give the values that a simulation chose."
        )
    if endings := [c.name for c in experiment.callbacks if may_end_runs(c.name)]:
        raise ConfigError(
            f"callback {endings[0]!r} may end runs, but a run on a SuperLink cannot be ended from "
            "here; leave it out, or choose callbacks that observe."
        )
    return follow(experiment.callbacks, monitor)


def _clean(text: str) -> str:
    """Return text without characters that would steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _write_event(event: Event, experiment: Experiment, folder: Path) -> None:
    """Write a round into the metrics of its run, as the simulator does."""
    target = _find_run(event, experiment, folder)[1]
    target.mkdir(parents=True, exist_ok=True)
    metrics = MetricsFile(target / "metrics.jsonl")
    metrics.write(event)
    metrics.close()


def _find_run(
    message: Event | RunResult, experiment: Experiment, folder: Path
) -> tuple[StrategySpec, Path]:
    """Return the strategy of a message and the folder of its run, which we know, not the sender."""
    titles = {entry.title: entry for entry in experiment.strategies}
    if message.strategy not in titles or message.seed not in experiment.seeds:
        raise ConfigError(
            f"the SuperLink's side tells of {_clean(message.strategy)!r} with seed {message.seed}, "
            "which is not a run of this experiment."
        )
    entry = titles[message.strategy]
    return entry, run_folder(folder, entry, message.seed)


def _describe_start(event: Event, experiment: Experiment, folder: Path) -> RunStart:
    entry, target = _find_run(event, experiment, folder)
    own = experiment.for_entry(entry)
    settings = own.model_dump(mode="json", exclude_none=True)
    return RunStart(event.strategy, event.seed, own.rounds, settings=settings, folder=target)


def _record_result(result: RunResult, experiment: Experiment, folder: Path) -> RunResult:
    entry, target = _find_run(result, experiment, folder)
    target.mkdir(parents=True, exist_ok=True)
    save_run(folder, experiment, entry, result)
    return result


def _read_messages(
    experiment: Experiment, superlink: SuperLink, saving: CheckpointPolicy
) -> Iterator[AppMessage]:
    """Yield the messages of the ServerApp while it runs."""
    with tempfile.TemporaryDirectory(prefix="fednorm-") as place:
        home, app = Path(place, "home"), Path(place, "app")
        _write_app(app, experiment, saving)
        home.mkdir()
        found = {"superlink": {"default": "chosen", "chosen": superlink.settings()}}
        (home / "config.toml").write_text(tomli_w.dumps(found), encoding="utf-8")
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        env = {**quiet, **os.environ, "FLWR_HOME": str(home), "PYTHONUNBUFFERED": "1"}
        yield from _stream([_find_flwr(), "run", str(app), "--stream"], env)


def _find_flwr() -> str:
    command = Path(sys.executable).with_name("flwr")
    if not command.exists():
        raise MissingFlowerError("engine 'flower'")
    return str(command)


def _stream(command: list[str], env: dict[str, str]) -> Iterator[AppMessage]:
    number, last, reader = None, "", LineReader()
    with subprocess.Popen(  # noqa: S603 (our own command)
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None, "it was asked for"  # noqa: S101
        try:
            for line in process.stdout:
                # Only the first: nodes can write into the log that follows.
                if number is None and (match := _STARTED.search(line)):
                    number = match[1]
                if message := reader.read(line):
                    yield message
                last = line.strip() or last
        except BaseException:
            process.terminate()
            if number is not None:  # the SuperLink would continue the run
                with contextlib.suppress(OSError, subprocess.SubprocessError):
                    subprocess.run([command[0], "stop", number], env=env, check=False, timeout=30)  # noqa: S603
            raise
    if number is None:
        raise ConfigError(f"the SuperLink did not take the run: {_clean(last)}")
    if reader.ignored:
        log.warning(
            "%d lines of the run's log pretended to come from the ServerApp and were ignored; a "
            "node or another program wrote them.",
            reader.ignored,
        )


def _write_app(folder: Path, experiment: Experiment, saving: CheckpointPolicy) -> None:
    """Write the app: its configuration is the experiment, its code an import."""
    package = folder / "fednorm_run"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "server.py").write_text(_SERVER, encoding="utf-8")
    (package / "client.py").write_text(_CLIENT, encoding="utf-8")
    chosen = experiment.model_copy(update={"engine": "flower", "callbacks": []})
    parts = {"serverapp": "fednorm_run.server:app", "clientapp": "fednorm_run.client:app"}
    config = {"experiment": chosen.model_dump_json(), "resume": saving.resume}
    config |= {} if saving.every is None else {"checkpoint-every": saving.every}
    flwr = {"app": {"publisher": "fednorm", "components": parts, "config": config}}
    project = {
        "name": "fednorm-run",
        "version": "1.0.0",
        "description": "An experiment of fednorm",
        "license": "Apache-2.0",
        "dependencies": [],  # fednorm is where the SuperLink and the SuperNodes are
    }
    build = {"requires": ["hatchling"], "build-backend": "hatchling.build"}
    content = {"build-system": build, "project": project, "tool": {"flwr": flwr}}
    (folder / "pyproject.toml").write_text(tomli_w.dumps(content), encoding="utf-8")
