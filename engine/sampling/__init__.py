"""The parts of the sampler: adjusting logits, cutting off the unlikely, and the noise."""
