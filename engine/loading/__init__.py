"""Makes a runner from a checkpoint: finds the files, reads the weights, and sizes the KV memory."""
