"""The models Raydix runs: one decoder whose config says which family it is."""
