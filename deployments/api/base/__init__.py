"""What every part of the API uses: errors, JSON with exact numbers, random ids, and work off the event loop."""
