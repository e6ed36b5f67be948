"""The fields of requests: their types and limits, and which are ignored, named or refused."""
