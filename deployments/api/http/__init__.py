"""HTTP itself: keys, bodies, disconnects, event streams and how often they write."""
