"""The models Raydix runs: one decoder, whose config selects the model family."""
