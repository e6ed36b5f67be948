"""Linear layers with plain and quantized weights, and the protocol of a layer's other operations."""
