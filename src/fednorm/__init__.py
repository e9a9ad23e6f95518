"""Normalization layers that are right in federated learning."""
