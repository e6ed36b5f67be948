"""The endpoints and the layers around them, as an ASGI application."""
