"""The parameters of models, counted once for all tests of a process: the largest are built on the meta device."""

from __future__ import annotations

from functools import cache

from cdrmix.config.schema_model import Model
from cdrmix.plan.parameters import ParameterCount, count_parameters


def parameters_of(model: Model) -> ParameterCount:
    return _counted(model.model_dump_json())


@cache
def _counted(json: str) -> ParameterCount:
    return count_parameters(Model.model_validate_json(json))
