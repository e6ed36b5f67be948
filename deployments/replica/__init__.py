"""The engine deployment: one engine in one Serve replica, its ranks, and its reports."""
