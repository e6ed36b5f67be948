"""Points of a prefix from which a request can resume, in models whose KV pages are not enough for that."""
