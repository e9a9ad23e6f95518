"""Experiments: how they run (run), and what is kept of them (run_folder)."""
