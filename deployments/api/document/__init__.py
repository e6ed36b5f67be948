"""/openapi.json and /docs: every endpoint with its parameters, body, answers and errors."""
