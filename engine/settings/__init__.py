"""The settings of an engine, with their bounds and defaults."""
