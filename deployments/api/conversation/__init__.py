"""Turns conversations into token ids: they are rendered, cut, and encoded except for parts encoded in earlier
turns."""
