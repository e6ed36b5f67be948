"""The prompt that a request becomes: its tools and messages rendered, and their token ids."""
