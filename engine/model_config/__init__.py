"""A model's configuration, read from its files by its family. Nothing here imports torch."""
