"""Constraints of an answer as one grammar: formats, tool calls, words, and the length of reasoning."""
