"""KV in host memory, of preempted requests and of evicted prefixes, and loans of KV to other engines."""
