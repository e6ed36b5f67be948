"""Answers that match a grammar: what may be asked for, how it is compiled, and which tokens it allows next."""
