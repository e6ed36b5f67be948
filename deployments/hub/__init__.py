"""The metrics hub deployment: the numbers of all processes on one page."""
