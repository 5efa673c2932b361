"""A potential as a sum of others, such as a prior and a learned correction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from chemtrain_mpi.errors import ArgumentError

Template = Callable[[Any], Callable[..., jax.Array]]


def sum_template(**templates: Template) -> Template:
    """``energy_fn_template`` of a sum: ``template(params)`` with ``params[name]`` for every named part.

    All parts share one neighbour list, which must reach the longest of their cutoffs.

    Raises
    ------
    ArgumentError
        Without a part, and from ``template`` if the names of the parameters are not those of the parts.
    """
    if not templates:
        raise ArgumentError("a sum needs at least one part: sum_template(prior=…, correction=…)")

    def template(params: Mapping[str, Any]) -> Callable[..., jax.Array]:
        if set(params) != set(templates):
            raise ArgumentError(
                f"the parts are {', '.join(sorted(templates))}; the parameters are for {', '.join(sorted(params))}"
            )
        parts = [part(params[name]) for name, part in templates.items()]

        def energy_fn(position: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
            total = parts[0](position, *args, **kwargs)
            for part in parts[1:]:
                total = total + part(position, *args, **kwargs)
            return total

        return energy_fn

    return template
