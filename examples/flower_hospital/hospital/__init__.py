"""Hospitals train a ResNet-18 together; their images stay where they are."""
