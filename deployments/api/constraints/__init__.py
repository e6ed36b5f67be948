"""What an answer must match, as one grammar: formats, tool calls, words, and the length of reasoning."""
