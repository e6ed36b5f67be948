"""Shared by every part of the API: errors, JSON with exact numbers, and work off the event loop."""
