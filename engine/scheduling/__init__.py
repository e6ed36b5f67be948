"""Decides what the next step computes: which requests have their turn, hold pages, or are preempted."""
