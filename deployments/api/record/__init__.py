"""The record of each request, and the metrics, timings and log lines that are read from it."""
