"""The attackers of the siege: one module for each kind."""
