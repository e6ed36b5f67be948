"""A model that the API serves: its card, its engines, and its tokenizer with its chat template."""
