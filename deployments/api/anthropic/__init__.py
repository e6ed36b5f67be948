"""Anthropic's API over the same plans and streams as OpenAI's."""
