"""The supported model families: each is a module, found because it is in this folder."""
