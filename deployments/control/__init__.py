"""Serve's controller and the cluster's state: where replicas run, and the loading and unloading of models."""
