"""A fleet in a computer's memory: recorded traffic through the real index, policies and radix trees.

Try a policy here before you deploy it. Events are discrete, without threads or a clock: a run depends only on its
trace, its scenario and its seed.
"""
