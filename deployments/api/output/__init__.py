"""A model's output: parsed into reasoning, text and calls, with log-probabilities, and encoded as JSON."""
