"""KV that moves between replicas: when fetching is cheaper than computing, from where, and for which prefixes."""
