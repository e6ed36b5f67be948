"""Many requests at once: files of them in OpenAI's batch format, and the prompts of a program.

    a file: BatchFile ──┐                                   ┌──▶ PartialOutput: a file in the input's order
                        ├─▶ BatchRunner ── post ──▶ an API ─┤
    a program: prompts ─┘     └ as many in flight as        └──▶ Answer, as they come
                                the API takes

Files that clients leave with a server lie in a spool, where a BatchWorker takes them up and leaves the answers.
This room knows no HTTP and no terminal: `post` sends one request, over a connection or within a process.
"""
