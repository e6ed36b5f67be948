"""Decides which tokens the next step computes, which requests hold pages, and which are preempted."""
