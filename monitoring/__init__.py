"""Metrics: the definitions by which every process counts, and the hub that serves their sum."""
