"""Start the processes that share a model, send them each step, and notice when one of them ends."""
