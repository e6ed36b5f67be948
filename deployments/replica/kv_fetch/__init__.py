"""KV that one replica fetches from another: the two ends, and the messages between them."""
