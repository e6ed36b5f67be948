"""What a model generates: how it is constrained, parsed into reasoning, text and calls, and encoded as JSON."""
