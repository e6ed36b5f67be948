"""Running a step: a plan as the device takes it, the forward pass, and its timing."""
