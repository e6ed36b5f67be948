"""What is known of each request: its record, and the metrics, timings and lines that are read from that."""
