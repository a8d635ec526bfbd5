"""Several coroutines at once, with one plain error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def together[Result](coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results in order. The first failure cancels the others and is raised as itself, not within a group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from errors
    return [task.result() for task in tasks]
