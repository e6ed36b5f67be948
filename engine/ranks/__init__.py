"""Several processes that run one model: starting them, telling them each step, noticing when one ends."""
