"""Modules that need Flower are looked at only where it is installed."""

from importlib.util import find_spec

collect_ignore_glob = (
    [] if find_spec("flwr") else ["src/fednorm/engines/flower/*", "src/fednorm/flower.py"]
)
