"""Modules that need Flower are looked at only where it is installed."""

from importlib.util import find_spec

_FLOWER = ("engines/flower/*", "experiment/flower/*", "flower.py")
collect_ignore_glob = [] if find_spec("flwr") else [f"src/fednorm/{path}" for path in _FLOWER]
