"""The running engine: its assembly, its loop, and the offline API."""
