"""The parts of the sampler: adjusting logits, truncating distributions, noise, log-probabilities."""
