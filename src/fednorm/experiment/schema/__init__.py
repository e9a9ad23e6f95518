"""The settings of an experiment: keys, their values, and what does not fit together."""
