"""Shared by every part of the API: errors, JSON with exact numbers, random ids, and work off the event loop."""
