"""The hub deployment: one metrics page for all processes, and the most valuable prefixes of the fleet."""
