"""Derivatives of a forecast by its start, parameters and forcing, by name, for NumPy and torch. Parameters of
a base that serves its fitted values alone are constants."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ups.common.device import plain_torch
from ups.forecast_measured import like_values
from ups.forecast_xarray import Field, as_tensor
from ups.models.head import TaskHead

Forecast = Callable[..., Tensor]  # of `Forecaster`


def forecast_of(
    forecast: Forecast, head: TaskHead, u0: Field, parameters: Any = None, num_frames: int = 1, **options: Any
) -> tuple[Callable[[Mapping[str, Tensor]], Tensor], dict[str, Tensor], Callable[[Tensor], Field]]:
    """(the forecast as a function of tensors by name, their values, a function that returns a tensor in the
    kind of u0)."""
    if hasattr(u0, "dims"):
        raise ValueError(
            f"{head.name} has no derivative by labelled values; expected NumPy or torch. Pass u0.values."
        )
    groups = {"parameters": parameters, "forcing": options.pop("forcing", None)}
    named = {key: one if isinstance(one, Mapping) else {key: one} for key, one in groups.items()}
    varied = {"u0": u0, **named["forcing"]}
    if not head.base.needs_fitted_parameters:
        varied |= named["parameters"]
    found = {name: one for name, one in varied.items() if one is not None}
    values = {name: as_tensor(one, f"{head.name}'s {name}").detach() for name, one in found.items()}

    def function(given: Mapping[str, Tensor]) -> Tensor:
        given = {**named["parameters"], **values, **given}
        groups = {key: {name: given.get(name) for name in some} for key, some in named.items()}
        groups = {key: some.get(key, some) for key, some in groups.items()}  # without names
        return forecast(head.name, given["u0"], num_frames=num_frames, **groups, **options)

    def restored(u: Tensor) -> Field:
        return u.detach() if isinstance(u0, Tensor) else u.detach().cpu().numpy()

    return function, values, restored


@plain_torch()
def vjp(
    forecast: Forecast, head: TaskHead, *given: Any, **options: Any
) -> tuple[Field, Callable[[Field], dict[str, Field]]]:
    """As `Forecaster.vjp`."""
    function, values, restored = forecast_of(forecast, head, *given, **options)
    values = {name: value.clone().requires_grad_() for name, value in values.items()}
    with torch.enable_grad():
        u_pred = function(values)

    def pull(v: Field) -> dict[str, Field]:
        v = like_values(head.name, "v", as_tensor(v, f"{head.name}'s v").detach(), u_pred.shape).to(u_pred)
        found = torch.autograd.grad(u_pred, [*values.values()], v, retain_graph=True)
        return {name: restored(one) for name, one in zip(values, found, strict=True)}

    return restored(u_pred), pull


@plain_torch()
def jvp(
    forecast: Forecast, head: TaskHead, *given: Any, along: Mapping[str, Any], **options: Any
) -> tuple[Field, Field]:
    """As `Forecaster.jvp`."""
    function, values, restored = forecast_of(forecast, head, *given, **options)
    along = along if isinstance(along, Mapping) else {}
    unknown = [repr(name) for name in along if name not in values]
    if unknown or not along:
        raise ValueError(
            f"{head.name} has no derivative by {', '.join(unknown) or 'nothing':.80}; expected "
            f"{', '.join(values)}. Pass changes of those by name."
        )
    starts, changes = {name: values[name] for name in along}, {}
    for name, one in starts.items():
        change = as_tensor(along[name], f"{head.name}'s {name}").to(one)
        changes[name] = like_values(head.name, f"a change of {name}", change, one.shape)
    return tuple(map(restored, torch.func.jvp(function, (starts,), (changes,))))
