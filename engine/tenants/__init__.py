"""How tenants share an engine, and the turns that anything shared is divided by."""
