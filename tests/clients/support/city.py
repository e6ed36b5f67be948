"""The form that structured answers fill in, for clients that take pydantic's models."""

from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    name: str
    population: int
    rivers: list[str]
