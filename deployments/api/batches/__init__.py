"""OpenAI's Files and Batches APIs over the spool (`deployments/batch/spool.py`), which all ingresses share.

POST /v1/files ── multipart ──▶ spool ◀── POST /v1/batches
                                  └──▶ BatchWorker ── as a client of this API ──▶ answers as files
"""
