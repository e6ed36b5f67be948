"""Raydix on Ray Serve: the application, its ingress and engine replicas, and the wire between them."""
