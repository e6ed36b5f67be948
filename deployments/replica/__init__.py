"""The engine deployment: one engine in one Serve replica, its ranks, and what it reports of itself."""
