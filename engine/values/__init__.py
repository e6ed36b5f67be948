"""The values that parts of an engine exchange: requests, plans and results of steps, and deltas of streams."""
