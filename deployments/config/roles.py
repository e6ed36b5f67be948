"""The setting `engines.roles`: replicas that compute prompts, and replicas that generate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from deployments.config.autoscaling import AutoscalingSettings
from deployments.config.section import Section
from router.fetch.roles import ROLES, Role


@dataclass(frozen=True, slots=True)
class Pool:
    """The replicas of one engine deployment: all of a model, or those that have one role."""

    role: Role | None
    """None: they do both."""
    size: int | AutoscalingSettings
    """How many there are, or how many there may be."""

    @property
    def scaling(self) -> AutoscalingSettings | None:
        """How the number follows the work; None where it is fixed."""
        return None if isinstance(self.size, int) else self.size

    @property
    def least(self) -> int:
        """Fewest replicas that are up when all is well."""
        return self.size if isinstance(self.size, int) else self.size.min

    @property
    def num_when_loaded(self) -> int:
        """Number of replicas that loading the model starts."""
        return self.size if isinstance(self.size, int) else max(1, self.size.initial or self.size.min)

    def deployment(self, model: str) -> str:
        """Return its name, where that of the model's deployment without roles is `model`."""
        return model if self.role is None else f"{model}:{self.role}"


def _form(given: Any) -> str:
    return "autoscaling" if isinstance(given, (dict, AutoscalingSettings)) else "number"


PoolSize = Annotated[
    Annotated[int, Field(ge=1), Tag("number")] | Annotated[AutoscalingSettings, Tag("autoscaling")],
    Discriminator(_form),
]
"""A fixed number of replicas, or the fields of `AutoscalingSettings`."""


class RoleSettings(Section):
    """How many replicas compute long prompts, and how many generate; see `router/fetch/roles.py`."""

    prefill: PoolSize
    """Replicas that compute long prompts, and generate only their first tokens: a number, or `min`, `max` and the
    other fields of `engines.autoscaling`, by which the number follows the prompts that come and wait."""
    decode: PoolSize
    """Replicas that continue these, and do all of short prompts: a number, or such fields, by which it follows the
    streams and their KV memory."""
    disaggregate_above_tokens: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Tokens of a prompt, cached on no replica that generates, above which it is computed apart. "auto": what
    takes a quarter of a second at the measured rate."""

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The replicas of each role."""
        return tuple(Pool(role, getattr(self, role)) for role in ROLES)

    @property
    def count(self) -> int:
        """Fewest replicas of all roles."""
        return sum(pool.least for pool in self.pools)

    @model_validator(mode="after")
    def _each_role_has_a_replica(self) -> Self:
        for pool in self.pools:
            if pool.least < 1:
                raise ValueError(
                    f"{pool.role}.min is 0, but replicas report the work of their role, so a role without "
                    "replicas never gets one. Set min to at least 1; to stop a model's last replicas, "
                    "unload the model"
                )
        return self
