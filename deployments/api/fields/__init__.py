"""The fields of requests: their types and limits, and what is ignored, named or refused."""
