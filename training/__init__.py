"""The embedded model's training: its corpus, its dialogues and the training itself. None of it is installed."""
