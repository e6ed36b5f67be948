"""Starts the processes that share a model, sends them each step, and notices when one of them ends."""
