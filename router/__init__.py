"""Where a request runs: placement by prefix and load, and the Serve `RequestRouter` that applies it."""
