"""Speculative decoding: draft tokens are proposed cheaply, and the model verifies many of them in one step.

    Scheduler ─ asks ─▶ Speculator ─▶ Drafter.propose      ngram.py: from the request's own text
        │                 ▲                                runner/draft_model.py: from a smaller model
        │                 │                                runner/layer_drafter.py: from the model's hidden states
        └─ plan, step, ───┘ how many were accepted
           apply

Draft tokens never change what is generated: each position is sampled with its own noise as if the draft tokens
before it were right, and its token is dropped if one of them was wrong.
"""
