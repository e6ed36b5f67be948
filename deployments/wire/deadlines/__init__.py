"""Deadlines on a peer's time: they do not count the time in which this process stood still."""
