"""Reproduce published tables and figures, each described by a TOML in `configs/`."""
