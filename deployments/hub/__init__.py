"""The hub deployment: one metrics page for all processes, and the prefixes that are worth most to the fleet."""
