"""KV below host memory: pages of prefixes in files, written and read while the engine's steps run.

settings.py      the operator's settings: `engine.kv_tier`
page_file.py     the file of a page
page_files.py    all of them in a directory, which several engines may share
page_mover.py    the threads that write and read them
rank_pages.py    the same for the other ranks' parts of each page
open_tier.py     both of them for one engine
"""
