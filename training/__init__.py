"""How the embedded model was trained: its corpus, its dialogues and the training. None of it is installed."""
