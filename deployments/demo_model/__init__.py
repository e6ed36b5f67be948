"""The embedded model, a 6M-parameter Qwen3 that knows the standard library's docstrings (see README.md)."""
