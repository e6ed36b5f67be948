"""Descriptions of a model's parts, and how a config.json states them. Nothing here imports torch."""
