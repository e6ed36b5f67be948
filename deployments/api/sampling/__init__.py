"""The sampling parameters that a request's fields become."""
