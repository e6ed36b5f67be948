"""OpenAI's Responses API: its requests become chat requests, and its answers are encoded, kept and continued here.

    body ─▶ protocol ─▶ items ─▶ translation ─▶ plan_chat ─▶ exchange ─▶ encoder ─▶ answer: items and events
               ▲ previous_response_id                                       └─▶ stored ─▶ store

A conversation has its items in a record of its own (`conversations.py`), to which responses add theirs.
A response that runs in the background is a request of its own, whose client is `background.py`.
"""
