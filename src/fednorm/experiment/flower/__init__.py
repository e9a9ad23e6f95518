"""Experiments on Flower: nodes, the app that a SuperLink runs, and its submission."""
