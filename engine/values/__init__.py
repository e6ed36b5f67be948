"""What parts of an engine hand to each other: a request, a step's plan and its result, what a stream gained."""
