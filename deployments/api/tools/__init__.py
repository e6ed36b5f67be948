"""Tool calls: what a request may ask for, how models write calls, and how to parse them from a stream of text."""
