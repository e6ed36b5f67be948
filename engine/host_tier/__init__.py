"""KV in host memory: of preempted requests and of evicted prefixes, and what other engines are lent."""
