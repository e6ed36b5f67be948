"""Tool calls: what may be asked for, how a model writes calls, and how they are found in its text as it comes."""
