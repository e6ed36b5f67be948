"""Text to tokens and back: the tokenizer, the text of a growing answer, and the tokens that end one."""
