"""Tokens, load and cache contents between engine replicas and ingresses: msgpack messages over ZeroMQ."""
