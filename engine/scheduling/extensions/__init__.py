"""Requests that need more than pages and turns: beam searches, and models with recurrent states."""
