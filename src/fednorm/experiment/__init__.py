"""Experiments: what is run (config), how (run), and what is kept (record)."""
