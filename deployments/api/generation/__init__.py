"""One generating request: planned, run and answered."""
