"""What a request may ask for: its fields, their limits, and the sampling parameters and tokens they become."""
