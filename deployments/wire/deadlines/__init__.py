"""Deadlines on a peer's time, which exclude the time in which this process was suspended."""
