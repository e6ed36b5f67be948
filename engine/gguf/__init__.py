"""Reads models in GGUF, llama.cpp's format: one file has the configuration, the tokenizer and the weights."""
