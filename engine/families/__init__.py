"""The supported model families: a module each, which is found by being here."""
