"""How rounds are executed: one process, one machine, or many."""
