"""One call on a group: from the arguments of a handle's method to its collected result."""

from typing import Any

from twinkle_core.remote import RemoteMark
from twinkle_core.remote.collect import join, needed_ranks
from twinkle_core.remote.dispatch import dispatch
from twinkle_ray.group import ActorGroup
from twinkle_ray.messages import Component, Request, Site


def call_group(
    ranks: ActorGroup, component: Component, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], mark: RemoteMark, *,
    data_states: list[dict[str, Any]] | None, is_lazy: bool,
) -> Any:
    """Call a method of a component and return what is collected of the results."""
    mesh = component.mesh
    calls = dict(enumerate(dispatch(mark.dispatch, args, kwargs, mesh)))
    wanted = [0] if mark.execute == "first" else needed_ranks(mark.collect, mesh, dispatch=mark.dispatch)
    if mark.execute == "first":
        calls = {0: calls[0]}
    request = Request(component=component.number, method=method, data_states=data_states, is_lazy=is_lazy)
    pending = ranks.submit(request, calls, wanted=wanted, site=Site.here(), what=f"`{component.cls.__name__}.{method}`")
    values = pending.fetch(wanted)
    if mark.execute == "first":
        return values[0]
    return mark.collect(values, mesh) if callable(mark.collect) else join(mark.collect, values)
