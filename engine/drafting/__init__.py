"""Speculative decoding: guessing tokens that the model then checks many at a time.

    Scheduler ─ asks ─▶ Speculator ─▶ Drafter.propose      ngram.py: from the request's own text
        │                 ▲                                draft_model.py: from a smaller model
        └─ plan, step, ───┘ how many of them were right
           apply

A guess never changes what is generated: each position is sampled with its own noise as if the guesses before it
were right, and is dropped where one was not.
"""
