"""What the next step computes: whose turn it is, who holds which pages, who is preempted."""
