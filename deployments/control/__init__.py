"""Serve's controller and the cluster's state: what runs where, and the loading and unloading of models."""
