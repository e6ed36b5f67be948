"""The running engine: how it is put together, its loop, and the offline API."""
