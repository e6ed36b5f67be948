"""Batches of many requests: files of them in OpenAI's batch format, and the prompts of a program.

    a file: BatchFile ──┐                                   ┌──▶ PartialOutput: a file in the input's order
                        ├─▶ BatchRunner ── post ──▶ an API ─┤
    a program: prompts ─┘     └ as many in flight as        └──▶ Answer, as they come
                                the API accepts

Files that clients leave with a server are in a spool, where a BatchWorker processes them and leaves the answers.
This package knows no HTTP and no terminal: `post` sends one request, over a connection or within a process.
"""
