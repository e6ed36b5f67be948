"""A fleet in a computer's memory: recorded traffic through the real index, policies and radix trees.

A policy change is a run here before it is a deployment. Discrete events, no threads, no clock: a run depends on
its trace, its scenario and its seed alone.
"""
