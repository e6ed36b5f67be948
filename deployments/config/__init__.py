"""The application's settings: every section of the YAML, with defaults, units and checks."""
