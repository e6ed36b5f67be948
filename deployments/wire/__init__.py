"""Tokens, load and cache news between engine replicas and ingresses: msgpack messages over ZeroMQ."""
