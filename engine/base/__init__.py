"""What all packages of the engine may use: errors, files, and the cores, clocks and memory of this process."""
