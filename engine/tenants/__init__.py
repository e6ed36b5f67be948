"""Divides an engine among tenants, by shares and by turns."""
