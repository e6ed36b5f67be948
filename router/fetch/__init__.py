"""KV that moves between replicas: when fetching is cheaper than computing, from where, and what is worth it."""
