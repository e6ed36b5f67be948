"""How models write calls and reasoning: formats found in chat templates, and parsed from a stream of text."""
