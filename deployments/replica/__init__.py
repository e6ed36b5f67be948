"""The engine deployment: one engine in one Serve replica, and what it reports of itself."""
