"""Experiments on Flower: nodes, the app that a SuperLink runs, and its submission."""

MARK = "fednorm> "  # begins a line of the app's log that is meant for `submit`
