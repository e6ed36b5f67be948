"""GPU kernels in Triton. Each has a launcher that takes tensors; nothing here depends on the engine."""
