"""The parts from which the API is built, and those that it shares with its successor."""
