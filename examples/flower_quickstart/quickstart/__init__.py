"""Handwritten digits with Flower and fednorm."""
