"""Reads models in GGUF, the format of llama.cpp: one file has the configuration, the tokenizer and the weights."""
