"""The cluster and Serve's controller: what runs where, and loading and unloading models."""
