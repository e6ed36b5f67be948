"""Structured output: which grammars requests may name, how they are compiled, and which tokens they allow next."""
