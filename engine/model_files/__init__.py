"""Finds and reads a model's files: a directory, a GGUF file or a pulled model."""
