"""Steps of decodes from rows that stay on the device, replayed as CUDA graphs."""
