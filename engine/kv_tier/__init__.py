"""KV below host memory: pages of prefixes in files, written and read beside the engine's steps.

settings.py      what the operator sets: `engine.kv_tier`
page_files.py    one file for each page, in a directory that several engines may share
page_mover.py    the threads that write and read them
open_tier.py     both of them for one engine
"""
