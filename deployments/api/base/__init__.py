"""What every part of the API uses: errors, JSON with exact numbers, and work off the event loop."""
