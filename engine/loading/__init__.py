"""From a checkpoint to a runner: finding the files, reading the weights, sizing the KV memory."""
